"""Stories of servers that hung, as evidence in files, and what must be said of each."""
