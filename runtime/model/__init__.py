"""What programs are made of: regions, partitions, tasks, launches, futures, mappers."""
