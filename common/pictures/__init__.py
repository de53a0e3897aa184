"""What both sides draw with: figures as PNG files, and a page of pictures with their numbers."""
