"""What is counted and reported of models: built where it happens, added up and read by every gateway."""
