"""What people see of a federation: status, exports and pictures."""
