"""The broker topology: exchanges, work queues, retry ladders, parking, as policies; planned, applied, compared."""
