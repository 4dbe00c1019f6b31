# exercise: 2
# expect: pass

def make_groups(shape):
    device = torch.accelerator.current_accelerator() if (
        dist.get_backend_config().startswith("cuda")) else torch.device("cpu")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    return {axis: mesh.get_group(axis) for axis in AXES}
