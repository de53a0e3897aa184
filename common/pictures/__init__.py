"""Drawing code of both sides: figures as PNG files, and a page of pictures with their numbers."""
