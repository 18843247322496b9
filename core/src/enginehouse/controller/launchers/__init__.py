"""Ways to bring the processes of a group up: as Ray actors (`ray`), or in this process (`inline`)."""
