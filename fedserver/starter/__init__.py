"""`fedserver new`: a small project to edit, which runs at once. Its files lie in `project/`, as they are written."""
