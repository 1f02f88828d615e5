"""Model repositories in object stores, as folders of this machine."""
