"""Views of a federation for people: status, exports, comparisons and pictures."""
