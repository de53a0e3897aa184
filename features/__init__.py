"""Features, each a folder that can be deleted: the core reaches them through `attune.seams` alone."""
