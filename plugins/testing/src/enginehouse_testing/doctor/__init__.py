"""`enginehouse plugins doctor`: examines each plugin in its own process."""
