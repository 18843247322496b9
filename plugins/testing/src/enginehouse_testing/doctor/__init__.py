"""`enginehouse plugins doctor`: each plugin is examined in a process of its own."""
