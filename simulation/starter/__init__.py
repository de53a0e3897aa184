"""`fedserver new`: a small project that runs at once and is there to be edited. Its files lie in `project/`."""
