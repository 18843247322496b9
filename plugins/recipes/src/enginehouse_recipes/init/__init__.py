"""What `enginehouse init` makes of its four answers: a question a file, and the files it writes."""
