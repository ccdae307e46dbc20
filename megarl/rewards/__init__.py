"""Rules that score responses, and how a reward named by the user is found and called."""
