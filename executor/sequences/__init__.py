"""The steps of sequences on an executor: from the inbox through a batch to the commit."""
