"""The kernels of the ray tracer: `find_visible` lists the geoms in view of each camera, `trace` draws each pixel.

The lighting is that of OpenGL's fixed pipeline, computed at the vertices of a face and interpolated; textures have
mipmaps; capsules and spheres are the coarse meshes that MuJoCo draws for them.
"""

from __future__ import annotations

import numpy as np
import warp as wp

from deft.envs.tabletop import textures
from deft.envs.tabletop.warp.model import MAX_LIGHTS

wp.set_module_options({"enable_backward": False})

PLANE, SPHERE, CAPSULE, CYLINDER, BOX = (wp.constant(number) for number in (0, 2, 3, 5, 6))  # MuJoCo's numbers
NUM_LIGHTS = wp.constant(MAX_LIGHTS)
# MuJoCo's meshes of round shapes have 14 sides: their mean radius is smaller than the circle's.
ROUND = wp.constant(0.5 * (1.0 + float(np.cos(np.pi / 14))))
LAMP_SPECULAR = wp.constant(0.2)
HEAD_DIFFUSE = wp.constant(0.25)
HEAD_SPECULAR = wp.constant(0.05)
NUM_LEVELS = wp.constant(textures.SIZE.bit_length())
FAR = wp.constant(1.0e6)


@wp.struct
class Hit:
    """Where a ray meets a geom, in the geom's frame; `face` is 1, 2 or 3 for x, y, z of a flat face, with its sign."""

    depth: float
    normal: wp.vec3
    face: int


@wp.struct
class Looks:
    """Arrays that hold the appearance of all environments."""

    geom_type: wp.array(dtype=int)
    size: wp.array2d(dtype=wp.vec3)
    rgba: wp.array2d(dtype=wp.vec4)
    material: wp.array2d(dtype=int)
    lights: wp.array3d(dtype=float)  # [N, lights, 9]: position, direction, colour
    ambient: wp.array(dtype=float)
    gloss: wp.array(dtype=wp.vec2)  # [materials]: specular, shininess
    texture: wp.array(dtype=int)  # [materials]: number of the texture, or -1
    repeat: wp.array(dtype=float)  # [materials]: repeats per metre
    texels: wp.array2d(dtype=wp.vec3)  # [textures, pixels of all levels]


@wp.struct
class Views:
    """The geoms in view of each camera: [N, cameras, G] each."""

    count: wp.array2d(dtype=int)
    geom: wp.array3d(dtype=int)
    bounds: wp.array3d(dtype=wp.vec4)  # left, right, bottom, top on the plane one metre from the camera
    origin: wp.array3d(dtype=wp.vec3)  # of the camera in the geom's frame
    rotation: wp.array3d(dtype=wp.mat33)  # from the camera's frame to the geom's


@wp.kernel
def find_visible(
    rows: wp.array(dtype=int),
    cameras: wp.array(dtype=int),
    tangents: wp.array(dtype=float),
    near: float,
    looks: Looks,
    radius: wp.array2d(dtype=float),
    geom_xpos: wp.array2d(dtype=wp.vec3),
    geom_xmat: wp.array2d(dtype=wp.mat33),
    cam_xpos: wp.array2d(dtype=wp.vec3),
    cam_xmat: wp.array2d(dtype=wp.mat33),
    views: Views,
):
    """List the visible geoms in the view of one camera of one environment, with their bounds in the image."""
    row, view = wp.tid()
    env = rows[row]
    camera = cameras[view]
    limit = tangents[view]
    position = cam_xpos[env, camera]
    turn = cam_xmat[env, camera]
    count = int(0)
    for geom in range(geom_xpos.shape[1]):
        if looks.rgba[env, geom][3] == 0.0:
            continue
        offset = geom_xpos[env, geom] - position
        away = wp.transpose(turn) @ offset
        bounds = wp.vec4(-FAR, FAR, -FAR, FAR)
        if looks.geom_type[geom] != PLANE:
            r = radius[env, geom]
            depth = -away[2]
            if depth + r < near:
                continue
            if depth - r > near:
                closest = 1.0 / (depth - r)
                farthest = 1.0 / (depth + r)
                left = wp.min((away[0] - r) * closest, (away[0] - r) * farthest)
                right = wp.max((away[0] + r) * closest, (away[0] + r) * farthest)
                bottom = wp.min((away[1] - r) * closest, (away[1] - r) * farthest)
                top = wp.max((away[1] + r) * closest, (away[1] + r) * farthest)
                if left > limit or right < -limit or bottom > limit or top < -limit:
                    continue
                bounds = wp.vec4(left, right, bottom, top)
        inverse = wp.transpose(geom_xmat[env, geom])
        views.geom[env, view, count] = geom
        views.bounds[env, view, count] = bounds
        views.origin[env, view, count] = -(inverse @ offset)
        views.rotation[env, view, count] = inverse @ turn
        count += 1
    views.count[env, view] = count


@wp.func
def slab(origin: float, direction: float, half: float) -> wp.vec2:
    """Return where a ray enters and leaves |x| <= half."""
    if wp.abs(direction) < 1.0e-9:
        if wp.abs(origin) > half:
            return wp.vec2(FAR, -FAR)
        return wp.vec2(-FAR, FAR)
    one = (-half - origin) / direction
    other = (half - origin) / direction
    return wp.vec2(wp.min(one, other), wp.max(one, other))


@wp.func
def sign_of(value: float) -> float:
    """Return -1 for negative numbers, otherwise 1."""
    return wp.where(value < 0.0, -1.0, 1.0)


@wp.func
def hit_box(origin: wp.vec3, direction: wp.vec3, size: wp.vec3) -> Hit:
    """Meet a box of these half sizes."""
    hit = Hit()
    hit.depth = -1.0
    x = slab(origin[0], direction[0], size[0])
    y = slab(origin[1], direction[1], size[1])
    z = slab(origin[2], direction[2], size[2])
    enter = wp.max(wp.max(x[0], y[0]), z[0])
    if enter > wp.min(wp.min(x[1], y[1]), z[1]):
        return hit
    hit.depth = enter
    if enter == x[0]:
        hit.normal = wp.vec3(-sign_of(direction[0]), 0.0, 0.0)
        hit.face = wp.where(direction[0] < 0.0, 1, -1)
    elif enter == y[0]:
        hit.normal = wp.vec3(0.0, -sign_of(direction[1]), 0.0)
        hit.face = wp.where(direction[1] < 0.0, 2, -2)
    else:
        hit.normal = wp.vec3(0.0, 0.0, -sign_of(direction[2]))
        hit.face = wp.where(direction[2] < 0.0, 3, -3)
    return hit


@wp.func
def quadratic(a: float, half_b: float, c: float) -> wp.vec2:
    """Return the interval in which a t² + 2 half_b t + c <= 0, for a > 0."""
    root = half_b * half_b - a * c
    if root < 0.0:
        return wp.vec2(FAR, -FAR)
    root = wp.sqrt(root)
    return wp.vec2((-half_b - root) / a, (-half_b + root) / a)


@wp.func
def hit_side(origin: wp.vec3, direction: wp.vec3, radius: float) -> wp.vec2:
    """Return where a ray enters and leaves an infinite cylinder about z."""
    a = direction[0] * direction[0] + direction[1] * direction[1]
    c = origin[0] * origin[0] + origin[1] * origin[1] - radius * radius
    if a < 1.0e-12:
        if c > 0.0:
            return wp.vec2(FAR, -FAR)
        return wp.vec2(-FAR, FAR)
    return quadratic(a, origin[0] * direction[0] + origin[1] * direction[1], c)


@wp.func
def hit_cylinder(origin: wp.vec3, direction: wp.vec3, size: wp.vec3) -> Hit:
    """Meet a closed cylinder about z: radius, half length."""
    hit = Hit()
    hit.depth = -1.0
    side = hit_side(origin, direction, ROUND * size[0])
    ends = slab(origin[2], direction[2], size[1])
    enter = wp.max(side[0], ends[0])
    if enter > wp.min(side[1], ends[1]):
        return hit
    hit.depth = enter
    if enter == ends[0]:
        hit.normal = wp.vec3(0.0, 0.0, -sign_of(direction[2]))
    else:
        point = origin + enter * direction
        hit.normal = wp.normalize(wp.vec3(point[0], point[1], 0.0))
    return hit


@wp.func
def hit_cone(origin: wp.vec3, direction: wp.vec3, apex: float, slope: float, base: float) -> float:
    """Return where a ray enters the side ρ = slope (apex - |z|) between |z| = base and the apex, on either end."""
    found = float(FAR)
    for end in range(2):
        up = wp.where(end == 0, 1.0, -1.0)
        # x² + y² <= slope² (apex - z)², with z along this end
        z = apex - up * origin[2]
        dz = -up * direction[2]
        k = slope * slope
        a = direction[0] * direction[0] + direction[1] * direction[1] - k * dz * dz
        half_b = origin[0] * direction[0] + origin[1] * direction[1] - k * z * dz
        c = origin[0] * origin[0] + origin[1] * origin[1] - k * z * z
        root = half_b * half_b - a * c
        if root >= 0.0 and wp.abs(a) > 1.0e-12:
            root = wp.sqrt(root)
            for sign in range(2):
                depth = (-half_b + wp.where(sign == 0, -root, root)) / a
                height = up * (origin[2] + depth * direction[2])
                # the surface faces the ray where its outward normal (x, y, k (apex - z)) points against it
                facing = (
                    (origin[0] + depth * direction[0]) * direction[0]
                    + (origin[1] + depth * direction[1]) * direction[1]
                    + k * (apex - height) * up * direction[2]
                )
                if height >= base and height <= apex and facing < 0.0 and depth < found and depth > 0.0:
                    found = depth
    return found


@wp.func
def hit_spindle(origin: wp.vec3, direction: wp.vec3, radius: float, base: float, apex: float) -> Hit:
    """Meet a cylinder between ±base with a cone at each end: MuJoCo's mesh of a capsule or, with base 0, a sphere."""
    hit = Hit()
    hit.depth = -1.0
    side = hit_side(origin, direction, radius)
    if side[0] > side[1]:
        return hit
    depth = float(FAR)
    if wp.abs(origin[2] + side[0] * direction[2]) <= base:
        depth = side[0]
    depth = wp.min(depth, hit_cone(origin, direction, apex, radius / (apex - base), base))
    if depth >= FAR:
        return hit
    hit.depth = depth
    point = origin + depth * direction
    outward = wp.normalize(wp.vec3(point[0], point[1], 0.0))
    part = wp.max(wp.abs(point[2]) - base, 0.0) / (apex - base)  # from the ring to the tip, colours are interpolated
    hit.normal = wp.normalize((1.0 - part) * outward + wp.vec3(0.0, 0.0, sign_of(point[2]) * part))
    return hit


@wp.func
def hit_plane(origin: wp.vec3, direction: wp.vec3, size: wp.vec3) -> Hit:
    """Meet a rectangle from the side of its normal z."""
    hit = Hit()
    hit.depth = -1.0
    if origin[2] <= 0.0 or direction[2] >= 0.0:
        return hit
    depth = -origin[2] / direction[2]
    point = origin + depth * direction
    if wp.abs(point[0]) <= size[0] and wp.abs(point[1]) <= size[1]:
        hit.depth = depth
        hit.normal = wp.vec3(0.0, 0.0, 1.0)
        hit.face = 3
    return hit


@wp.func
def hit_geom(kind: int, origin: wp.vec3, direction: wp.vec3, size: wp.vec3) -> Hit:
    """Return where a ray first meets a geom; the depth is negative if it does not."""
    if kind == BOX:
        return hit_box(origin, direction, size)
    if kind == CYLINDER:
        return hit_cylinder(origin, direction, size)
    if kind == CAPSULE:
        return hit_spindle(origin, direction, ROUND * size[0], size[1], size[1] + size[0])
    if kind == SPHERE:
        return hit_spindle(origin, direction, ROUND * size[0], 0.0, size[0])
    return hit_plane(origin, direction, size)


@wp.func
def light_at(
    looks: Looks,
    env: int,
    point: wp.vec3,
    normal: wp.vec3,
    viewer: wp.vec3,
    forward: wp.vec3,
    rgb: wp.vec3,
    gloss: wp.vec2,
) -> wp.vec3:
    """Return OpenGL's colour of a vertex: Σ ambient + diffuse (n·l) + specular (n·h)^shininess, at most 1."""
    toward_viewer = wp.normalize(viewer - point)
    shininess = 128.0 * gloss[1]
    colour = looks.ambient[env] * rgb
    facing = -wp.dot(normal, forward)
    if facing > 0.0:
        between = wp.dot(normal, wp.normalize(toward_viewer - forward))
        shine = gloss[0] * HEAD_SPECULAR * wp.pow(wp.max(between, 0.0), shininess)
        colour += HEAD_DIFFUSE * facing * rgb + wp.vec3(shine, shine, shine)
    for lamp in range(NUM_LIGHTS):
        place = wp.vec3(looks.lights[env, lamp, 0], looks.lights[env, lamp, 1], looks.lights[env, lamp, 2])
        axis = wp.vec3(looks.lights[env, lamp, 3], looks.lights[env, lamp, 4], looks.lights[env, lamp, 5])
        tint = wp.vec3(looks.lights[env, lamp, 6], looks.lights[env, lamp, 7], looks.lights[env, lamp, 8])
        toward = wp.normalize(place - point)
        facing = wp.dot(normal, toward)
        # an unused lamp has the axis 0; the cone of the others is a half space
        if facing > 0.0 and wp.dot(toward, axis) < 0.0:
            between = wp.dot(normal, wp.normalize(toward_viewer + toward))
            shine = gloss[0] * LAMP_SPECULAR * wp.pow(wp.max(between, 0.0), shininess)
            colour += facing * wp.cw_mul(tint, rgb) + wp.vec3(shine, shine, shine)
    return wp.min(colour, wp.vec3(1.0, 1.0, 1.0))


@wp.func
def texel(looks: Looks, texture: int, level: int, column: int, row: int) -> wp.vec3:
    """Return one pixel of a level of a texture, which repeats."""
    side = wp.static(textures.SIZE) >> level
    # levels follow each other: 4/3 SIZE² (1 - 4^-level) pixels precede this one
    start = (wp.static(4 * textures.SIZE * textures.SIZE) - 4 * side * side) / 3
    return looks.texels[texture, start + (row & (side - 1)) * side + (column & (side - 1))]


@wp.func
def bilinear(looks: Looks, texture: int, level: int, s: float, t: float) -> wp.vec3:
    """Return a level of a texture at (s, t), between its four nearest pixels."""
    side = float(wp.static(textures.SIZE) >> level)
    x = s * side - 0.5
    y = t * side - 0.5
    left = wp.floor(x)
    low = wp.floor(y)
    column = int(left)
    row = int(low)
    upper = wp.lerp(texel(looks, texture, level, column, row), texel(looks, texture, level, column + 1, row), x - left)
    lower = wp.lerp(
        texel(looks, texture, level, column, row + 1), texel(looks, texture, level, column + 1, row + 1), x - left
    )
    return wp.lerp(upper, lower, y - low)


@wp.func
def texture_colour(looks: Looks, texture: int, s: float, t: float, footprint: float) -> wp.vec3:
    """Return the texture at (s, t), filtered over a footprint in pixels of its finest level."""
    level = wp.clamp(wp.log2(wp.max(footprint, 1.0)), 0.0, float(NUM_LEVELS - 1))
    finer = int(wp.floor(level))
    colour = bilinear(looks, texture, finer, s, t)
    part = level - float(finer)
    if part > 0.0:
        colour = wp.lerp(colour, bilinear(looks, texture, wp.min(finer + 1, NUM_LEVELS - 1), s, t), part)
    return colour


@wp.func
def on_face(face: int, height: float, x: float, y: float) -> wp.vec3:
    """Return the point (x, y) of a face, in the order of axes of MuJoCo's mesh of a box."""
    if wp.abs(face) == 1:
        return wp.vec3(height, x, y)
    if wp.abs(face) == 2:
        return wp.vec3(x, height, y)
    return wp.vec3(x, y, height)


@wp.kernel
def trace(
    rows: wp.array(dtype=int),
    cameras: wp.array(dtype=int),
    tangents: wp.array(dtype=float),
    near: float,
    side: int,
    looks: Looks,
    geom_xpos: wp.array2d(dtype=wp.vec3),
    geom_xmat: wp.array2d(dtype=wp.mat33),
    cam_xpos: wp.array2d(dtype=wp.vec3),
    cam_xmat: wp.array2d(dtype=wp.mat33),
    views: Views,
    images: wp.array4d(dtype=wp.uint8),
):
    """Draw one pixel: images [N, 3 cameras, side, side]."""
    row, view, pixel = wp.tid()
    env = rows[row]
    camera = cameras[view]
    step = 2.0 * tangents[view] / float(side)
    u = (float(pixel % side) + 0.5) * step - tangents[view]
    v = tangents[view] - (float(pixel / side) + 0.5) * step
    ray = wp.vec3(u, v, -1.0)

    best = Hit()
    best.depth = FAR
    found = int(-1)
    for index in range(views.count[env, view]):
        bounds = views.bounds[env, view, index]
        if u < bounds[0] or u > bounds[1] or v < bounds[2] or v > bounds[3]:
            continue
        geom = views.geom[env, view, index]
        direction = views.rotation[env, view, index] @ ray
        hit = hit_geom(looks.geom_type[geom], views.origin[env, view, index], direction, looks.size[env, geom])
        if hit.depth > near and hit.depth < best.depth:
            best = hit
            found = index

    colour = wp.vec3(0.0, 0.0, 0.0)
    if found >= 0:
        geom = views.geom[env, view, found]
        origin = views.origin[env, view, found]
        turn = views.rotation[env, view, found]
        point = origin + best.depth * (turn @ ray)
        place = geom_xpos[env, geom]
        frame = geom_xmat[env, geom]
        viewer = cam_xpos[env, camera]
        forward = -(cam_xmat[env, camera] @ wp.vec3(0.0, 0.0, 1.0))
        tint = looks.rgba[env, geom]
        rgb = wp.vec3(tint[0], tint[1], tint[2])
        material = looks.material[env, geom]
        gloss = wp.vec2(0.5, 0.5)  # MuJoCo's default
        if material >= 0:
            gloss = looks.gloss[material]
        normal = wp.normalize(frame @ best.normal)
        if best.face == 0:
            colour = light_at(looks, env, place + frame @ point, normal, viewer, forward, rgb, gloss)
        else:  # interpolate between three vertices of one of the two triangles of the quad
            size = looks.size[env, geom]
            axis = wp.abs(best.face)
            x = point[0]
            y = point[1]
            half_x = size[0]
            half_y = size[1]
            height = wp.where(best.face > 0, size[2], -size[2])
            if axis == 1:
                x = point[1]
                y = point[2]
                half_x = size[1]
                half_y = size[2]
                height = wp.where(best.face > 0, size[0], -size[0])
            elif axis == 2:
                y = point[2]
                half_y = size[2]
                height = wp.where(best.face > 0, size[1], -size[1])
            left = -half_x
            low = -half_y
            right = half_x
            high = half_y
            if looks.geom_type[geom] == PLANE:  # two by two quads
                height = 0.0
                left = wp.where(x < 0.0, -half_x, 0.0)
                right = left + half_x
                low = wp.where(y < 0.0, -half_y, 0.0)
                high = low + half_y
            a = wp.clamp((x - left) / (right - left), 0.0, 1.0)
            b = wp.clamp((y - low) / (high - low), 0.0, 1.0)
            falls = best.face == -3 or best.face == -1 or best.face == 2
            if falls:  # the diagonal of these faces runs from the upper left to the lower right
                b = 1.0 - b
                swap = low
                low = high
                high = swap
            first = place + frame @ on_face(best.face, height, left, low)
            last = place + frame @ on_face(best.face, height, right, high)
            third = place + frame @ on_face(
                best.face, height, wp.where(a >= b, right, left), wp.where(a >= b, low, high)
            )
            c_first = light_at(looks, env, first, normal, viewer, forward, rgb, gloss)
            c_last = light_at(looks, env, last, normal, viewer, forward, rgb, gloss)
            c_third = light_at(looks, env, third, normal, viewer, forward, rgb, gloss)
            most = wp.max(a, b)
            least = wp.min(a, b)
            colour = (1.0 - most) * c_first + (most - least) * c_third + least * c_last
        if material >= 0:
            texture = looks.texture[material]
            if texture >= 0:
                scale = 0.5 * looks.repeat[material]
                # the same face under the rays of the next pixels to the right and below
                across = turn @ wp.vec3(u + step, v, -1.0)
                below = turn @ wp.vec3(u, v - step, -1.0)
                distance = wp.dot(best.normal, point - origin)
                beside = origin + (distance / wp.dot(best.normal, across)) * across - point
                under = origin + (distance / wp.dot(best.normal, below)) * below - point
                reach = wp.max(wp.length(wp.vec2(beside[0], beside[1])), wp.length(wp.vec2(under[0], under[1])))
                footprint = scale * reach * float(wp.static(textures.SIZE))
                s = scale * point[0] - 0.5
                t = -scale * point[1] - 0.5
                colour = wp.cw_mul(colour, texture_colour(looks, texture, s, t, footprint))
    for channel in range(3):
        level = wp.clamp(colour[channel], 0.0, 1.0) * 255.0 + 0.5
        images[env, 3 * view + channel, pixel / side, pixel % side] = wp.uint8(int(level))
