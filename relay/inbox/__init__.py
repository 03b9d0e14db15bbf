"""The consumer's half: once per message, in the consumer's own database. Imports nothing of the engine."""
