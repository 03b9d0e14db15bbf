"""`relay redrive`: parked messages of a broker's queue back to work."""
