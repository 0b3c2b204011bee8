"""Pictures for tests, and tiny pipelines that take them."""
