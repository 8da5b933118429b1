"""The same collector on every node of an engine, and one verdict over what they answered."""
