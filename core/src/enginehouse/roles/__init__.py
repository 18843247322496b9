"""What plays a role: its plan, its worker, where it runs, and who has the devices."""
