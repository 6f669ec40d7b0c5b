"""What services need of the world, as protocols; adapters keep the promises written here."""
