"""The coordinator, hosted by server 0: members, passes, bucket map, leases, meetings."""
