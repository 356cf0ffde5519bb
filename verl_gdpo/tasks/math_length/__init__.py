"""Mathematics with a limit of length."""
