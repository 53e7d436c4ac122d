"""Programs of the repository that no user of the package runs."""
