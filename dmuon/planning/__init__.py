"""What a training step will cost, worked out from names, shapes and the mesh, without any rank."""
