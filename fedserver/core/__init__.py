"""The rounds: pure decisions (messages, round), and the coordinator that carries them out."""
