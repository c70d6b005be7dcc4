"""The kernel that finds the row of every assignment."""
