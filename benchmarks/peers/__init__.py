"""What expstore is compared with, each with the methods that its workloads time."""
