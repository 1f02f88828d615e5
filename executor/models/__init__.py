"""What an executor serves: repositories read, models loaded, controlled, warmed up, swapped and retired."""
