"""The pieces of a round on the workers of a Ray cluster (`--lab ray`), which keep no state: a call can always be made again."""
