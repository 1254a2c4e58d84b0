"""What several test files share: doubles, small checkpoints, servers, generated cases."""
