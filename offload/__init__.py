"""Where weights rest and how they travel; knows nothing of tokens."""
