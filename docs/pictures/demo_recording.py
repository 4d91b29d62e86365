"""The animated picture of `make demo`: its real output in a terminal, in quick motion, and its video.

    python docs/pictures/demo_recording.py record demo.jsonl -- make demo
    python docs/pictures/demo_recording.py render demo.jsonl docs/pictures/demo.webp --video RUN/before_after.mp4

`record` runs a command in a terminal of 120 × 28 characters and writes what it prints, a line of JSON [seconds, text]
each time. `render` draws the terminal at equal intervals of that time, then the video.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import imageio.v3 as imageio
import matplotlib
from PIL import Image, ImageDraw, ImageFont

COLUMNS, ROWS = 120, 28
FONT_SIZE, LINE = 11, 15
TERMINAL_FRAMES, TERMINAL_MS, LAST_MS = 70, 180, 3000  # frames of the terminal, how long each stays, and the last
VIDEO_EVERY, VIDEO_MS = 4, 160  # frames of the video that are left out, and how long one stays
INK, PAPER = (220, 220, 220), (24, 26, 31)
SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]|\r|\n|\x07|[^\x1b\r\n\x07]+")


class Screen:
    """The part of a terminal that rich's progress bars and tables use: lines, moves of the cursor, erasing."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        """Print text with control sequences; colours are ignored."""
        for match in SEQUENCE.finditer(text):
            word, code = match[0], match[2]
            if code == "A":
                self.row = max(0, self.row - int(match[1] or 1))
            elif code == "K":
                line = self.lines[self.row]
                self.lines[self.row] = "" if match[1] == "2" else line[: self.column]
            elif word == "\r":
                self.column = 0
            elif word == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif not word.startswith(("\x1b", "\x07")):
                self._write(word)

    def _write(self, text: str) -> None:
        for part in re.findall(r"[^\x00]", text):
            if self.column == COLUMNS:  # the terminal wraps
                self.feed("\r\n")
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
            self.column += 1

    def draw(self, font: ImageFont.FreeTypeFont) -> Image.Image:
        """Return the last lines as an image."""
        width = round(font.getlength("M") * COLUMNS) + 16
        image = Image.new("RGB", (width, LINE * ROWS + 12), PAPER)
        shown = self.lines if self.lines[-1] else self.lines[:-1]
        for number, line in enumerate(shown[-ROWS:]):
            ImageDraw.Draw(image).text((8, 6 + number * LINE), line, INK, font)
        return image


def record(path: Path, command: list[str]) -> int:
    """Run a command in a terminal, show and write what it prints, and return its exit status."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execvp(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started = time.monotonic()
    with open(path, "w", encoding="utf-8") as file:
        while True:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the command ended
                break
            if not data:
                break
            text = data.decode(errors="replace")
            sys.stdout.write(text)
            sys.stdout.flush()
            file.write(json.dumps([round(time.monotonic() - started, 2), text]) + "\n")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def render(path: Path, out: Path, video: Path | None) -> None:
    """Draw a recording, and a video after it, as one animated picture."""
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf", FONT_SIZE)
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    screen, images, times = Screen(), [], []
    interval = events[-1][0] / TERMINAL_FRAMES
    for seconds, text in events:
        while seconds > interval * (len(images) + 1):
            images.append(screen.draw(font))
            times.append(TERMINAL_MS)
        screen.feed(text)
    images.append(screen.draw(font))
    times.append(LAST_MS)
    if video is not None:
        size = images[0].size
        for frame in list(imageio.imiter(video, plugin="FFMPEG"))[::VIDEO_EVERY]:
            page = Image.new("RGB", size, PAPER)
            scene = Image.fromarray(frame)
            scene.thumbnail(size)
            page.paste(scene, ((size[0] - scene.width) // 2, (size[1] - scene.height) // 2))
            images.append(page)
            times.append(VIDEO_MS)
    images[0].save(out, save_all=True, append_images=images[1:], duration=times, loop=0, quality=55, method=4)
    print(f"{out}: {len(images)} frames, {out.stat().st_size:,} bytes")


def main() -> int:
    """Record or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("path", type=Path)
    recorder.add_argument("command", nargs="+")
    renderer = commands.add_parser("render")
    renderer.add_argument("path", type=Path)
    renderer.add_argument("out", type=Path)
    renderer.add_argument("--video", type=Path)
    given = parser.parse_args()
    if given.action == "record":
        return record(given.path, given.command)
    render(given.path, given.out, given.video)
    return 0


if __name__ == "__main__":
    sys.exit(main())
