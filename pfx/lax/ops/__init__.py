"""What torch's own ops read, write and return, and graphs of them in which no op writes."""
