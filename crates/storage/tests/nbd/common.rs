//! Servers for tests, and the disks below them.

use longhaul_storage::disk::{Disk, ExportSize, Extent, RawDisk, Zeros};
use longhaul_storage::nbd::{Export, ExportName, Limits, Notice, Server};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const NAME: &str = "5d41402abc4b2a76b9719d911017c592";
/// Generous: no test waits this long on a working machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server of one disk.
pub(crate) struct Served {
    pub(crate) server: Server,
    pub(crate) notices: Arc<Mutex<Vec<Notice>>>,
    folder: TempDir,
}

impl Served {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        Self::within(disk, tempfile::tempdir().unwrap(), Limits::default())
    }

    pub(crate) fn within(disk: Arc<dyn Disk>, folder: TempDir, limits: Limits) -> Self {
        let listener = UnixListener::bind(folder.path().join("nbd")).unwrap();
        let name = ExportName::new(NAME.to_owned()).unwrap();
        let notices = Arc::new(Mutex::new(Vec::new()));
        let told = notices.clone();
        let notify = move |notice| told.lock().unwrap().push(notice);
        let exports = vec![Export { name, disk }];
        Self {
            server: Server::start(listener, exports, limits, notify).unwrap(),
            notices,
            folder,
        }
    }

    /// Serves an image of this size that is one hole.
    pub(crate) fn image(size_bytes: u64) -> (Self, PathBuf) {
        Self::image_as(size_bytes, ExportSize::OfFile)
    }

    pub(crate) fn image_as(file_bytes: u64, size: ExportSize) -> (Self, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        File::create(&path).unwrap().set_len(file_bytes).unwrap();
        let disk = Arc::new(RawDisk::open(&path, size).unwrap());
        (Self::within(disk, folder, Limits::default()), path)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///{NAME}?socket={}", self.socket().display())
    }

    pub(crate) fn wait_for_connections(&self, count: usize) {
        wait_until(|| self.server.connections() == count);
    }

    /// Returns the texts of all failures so far.
    pub(crate) fn notices(&self) -> Vec<String> {
        let notices = self.notices.lock().unwrap();
        notices.iter().map(ToString::to_string).collect()
    }
}

pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "it never came about");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// Returns a foreign program; `None` (with a message) where it is missing and may be.
pub(crate) fn program(name: &str) -> Option<Command> {
    if Command::new(name).arg("--version").output().is_ok() {
        return Some(Command::new(name));
    }
    let required = std::env::var_os("LONGHAUL_LAB_REQUIRE_ALL").is_some_and(|value| value != "0");
    assert!(!required, "no {name} here: scripts/install lab");
    eprintln!("skipped: no {name} here (scripts/install lab)");
    None
}

/// Runs a program to its end. Returns its output on stdout and stderr.
pub(crate) fn output(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

pub(crate) fn succeed(command: &mut Command) -> String {
    let (success, text) = output(command);
    assert!(success, "{command:?}: {text}");
    text
}

/// A disk that can fail and block, and counts flushes.
#[derive(Debug)]
pub(crate) struct Moody {
    pub(crate) size_bytes: u64,
    pub(crate) mood: Mutex<Mood>,
    pub(crate) changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct Mood {
    /// The error of all operations.
    pub(crate) errno: Option<i32>,
    /// The error of flushes only.
    pub(crate) flush_errno: Option<i32>,
    pub(crate) held: bool,
    /// Writes that wait or are done.
    pub(crate) writes: usize,
    pub(crate) flushes: usize,
    pub(crate) bytes: Vec<u8>,
}

impl Moody {
    pub(crate) fn new(size_bytes: usize) -> Arc<Self> {
        let mood = Mood {
            bytes: vec![0; size_bytes],
            ..Mood::default()
        };
        Arc::new(Self {
            size_bytes: size_bytes as u64,
            mood: Mutex::new(mood),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Mood)) {
        change(&mut self.mood.lock().unwrap());
        self.changed.notify_all();
    }

    pub(crate) fn get<T>(&self, value: impl FnOnce(&Mood) -> T) -> T {
        value(&self.mood.lock().unwrap())
    }

    fn fails(&self) -> io::Result<()> {
        let errno = self.get(|mood| mood.errno);
        errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

impl Disk for Moody {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.fails()?;
        let start = offset as usize;
        self.get(|mood| buffer.copy_from_slice(&mood.bytes[start..start + buffer.len()]));
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut mood = self.mood.lock().unwrap();
        mood.writes += 1;
        self.changed.notify_all();
        while mood.held {
            mood = self.changed.wait(mood).unwrap();
        }
        drop(mood);
        self.fails()?;
        let start = offset as usize;
        self.set(|mood| mood.bytes[start..start + bytes.len()].copy_from_slice(bytes));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.fails()?;
        self.set(|mood| mood.flushes += 1);
        let errno = self.get(|mood| mood.flush_errno);
        errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    fn zero(&self, range: Range<u64>, _zeros: Zeros) -> io::Result<()> {
        self.write(range.start, &vec![0; (range.end - range.start) as usize])
    }

    fn discard(&self, _range: Range<u64>) -> io::Result<()> {
        self.fails()
    }

    fn extents(&self, range: Range<u64>, _count_max: usize) -> io::Result<Vec<Extent>> {
        self.fails()?;
        Ok(vec![Extent {
            length_bytes: range.end - range.start,
            hole: false,
        }])
    }
}
