//! Writes files on a disk of the `tiny` guest, beside QEMU's guest agent, which can freeze the file
//! system. Prints a line for each file. Runs until the file that its argument names is there.

// Parts of the arena, of which not all is used.
#[allow(dead_code)]
#[path = "../../arena/src/port.rs"]
mod port;
#[allow(dead_code)]
#[path = "../../arena/src/sys.rs"]
mod sys;

use port::Port;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

const DEVICE: &str = "/dev/vda";
const FOLDER: &str = "/mnt";
const AGENT: &str = "/usr/sbin/qemu-ga";
const AGENT_PORT: &str = "org.qemu.guest_agent.0";
const FILES: u64 = 16;
const FILE_BYTES: usize = 64 << 10;
const PAUSE: Duration = Duration::from_millis(20);

fn main() {
    let stop_file = std::env::args().nth(1).unwrap_or_default();
    if let Err(error) = run(Path::new(&stop_file)) {
        println!("error: {error}");
    }
}

fn run(stop_file: &Path) -> io::Result<()> {
    fs::create_dir_all(FOLDER)?;
    sys::mount(DEVICE, FOLDER, "ext4")?;
    let port = Port::find(AGENT_PORT).ok_or_else(|| io::Error::other("it has no such port"))?;
    let mut agent = Command::new(AGENT)
        .args(["-m", "virtio-serial", "-t", "/run", "-f", "/run/qga.pid", "-p"])
        .arg(port)
        .spawn()?;
    for number in 0.. {
        if stop_file.exists() {
            break;
        }
        let mut file = File::create(Path::new(FOLDER).join(format!("{}", number % FILES)))?;
        file.write_all(&vec![number as u8; FILE_BYTES])?;
        // Now and then it is in the page cache alone.
        if number % 4 == 0 {
            file.sync_all()?;
        }
        println!("{number}");
        thread::sleep(PAUSE);
    }
    agent.kill()
}
