"""Pictures of finished models' answers, and a watch for their drift."""
