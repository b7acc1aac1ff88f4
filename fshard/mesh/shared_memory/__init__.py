"""Transport between the processes of one machine, through memory that they share."""
