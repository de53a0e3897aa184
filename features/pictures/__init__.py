"""Pictures of a federation as files and a page (`fedserver plot`): accuracies, devices, attention and embeddings."""
