"""The ways to reach the nodes of an engine: each says which nodes there are and how one is asked."""
