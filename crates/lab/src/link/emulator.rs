//! Implements the emulator's process: a TAP in each of two namespaces, a thread per direction that
//! carries frames between them by the rules of [`Direction`], and a socket for changes of the link.
//!
//! It ends when its standard input does: together with the process that started it, for any reason.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use serde::{Deserialize, Serialize};

use super::shape::{Direction, Drop, Fate};
use super::spec::LinkSpec;
use super::stats::{DirectionStats, Lateness, LinkStats};
use crate::error::{During, LabError};
use crate::netns::Namespace;
use crate::tap;

/// The maximum length of a frame: an Ethernet header and 1500 bytes, with some room for tags.
const FRAME_BYTES_MAX: usize = 1600;
/// The number of frames read at once before those that are due are written.
const BATCH_FRAMES: usize = 64;
/// The minimum interval of a direction's wake-ups; departures in between share a wake-up.
const NAP: Duration = Duration::from_micros(50);
/// The maximum sleep, after which a change of the link is noticed.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// The maximum time by which the arrival of frames found after a late wake-up is backdated.
const CREDIT_MAX: Duration = Duration::from_millis(5);

/// The configuration of an emulator process, as JSON in its only argument.
#[derive(Debug, Serialize, Deserialize)]
pub struct EmulatorConfig {
    /// Namespace and interface name of either end.
    pub ends: [EndConfig; 2],
    /// The link to emulate.
    pub spec: LinkSpec,
    /// The seed of the random losses.
    pub seed: u64,
    /// The path of the control socket.
    pub control: PathBuf,
}

/// One end of an emulated link.
#[derive(Debug, Serialize, Deserialize)]
pub struct EndConfig {
    /// The network namespace's name.
    pub namespace: String,
    /// The name of its TAP.
    pub interface: String,
}

/// A request to an emulator, one JSON object a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Return the counters.
    Stats,
    /// Change the link.
    Change(LinkSpec),
    /// Drop every frame for this long, in ms.
    CutMs(u64),
    /// End a cut now.
    Heal,
}

/// An answer of an emulator, one JSON object a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Done.
    Done,
    /// The counters.
    Stats(Box<LinkStats>),
    /// The request failed, with the reason.
    Failed(String),
}

/// Runs an emulator until its standard input ends.
///
/// # Errors
/// When the TAPs or the socket cannot be created (it needs root and /dev/net/tun).
pub fn run_emulator(config: &EmulatorConfig) -> Result<(), LabError> {
    raise_priority();
    let taps = [open_tap(&config.ends[0])?, open_tap(&config.ends[1])?];
    let listener = UnixListener::bind(&config.control)
        .during(|| format!("make the socket {}", config.control.display()))?;
    let started = Instant::now();
    let directions = [0, 1].map(|from| {
        Arc::new(Carrier {
            started,
            link: Mutex::new(Direction::new(config.spec, config.seed ^ from)),
            counters: Counters::default(),
        })
    });
    for (from, carrier) in directions.iter().enumerate() {
        let (input, output) = (duplicate(&taps[from])?, duplicate(&taps[1 - from])?);
        let carrier = Arc::clone(carrier);
        thread::Builder::new()
            .name(format!("direction-{from}"))
            .spawn(move || carrier.carry(&input, &output))
            .during(|| "start a thread".to_owned())?;
    }
    thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || serve(&listener, &directions))
        .during(|| "start a thread".to_owned())?;
    println_ready()?;
    let mut rest = Vec::new();
    // The other end of the pipe is held by the parent process, which never writes to it.
    let _ = io::stdin().read_to_end(&mut rest);
    let _ = fs::remove_file(&config.control);
    Ok(())
}

/// Reports to the parent process that the interfaces exist.
fn println_ready() -> Result<(), LabError> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(b"ready\n")
        .and_then(|()| stdout.flush())
        .during(|| "say that the link is ready".to_owned())
}

fn duplicate(file: &File) -> Result<File, LabError> {
    file.try_clone()
        .during(|| "duplicate a descriptor".to_owned())
}

/// Gives this process priority over others; the parent sets the nice value. A session of its own
/// protects it from a Ctrl-C at the terminal.
fn raise_priority() {
    // It may be a session's leader already.
    let _ = nix::unistd::setsid();
    // With autogroups a nice value counts only inside its session, so the session gets one too.
    // A kernel without them has no such file.
    let _ = fs::write("/proc/self/autogroup", "-20");
}

/// Creates a TAP in a namespace; it lives as long as the file.
fn open_tap(end: &EndConfig) -> Result<File, LabError> {
    let namespace = Namespace::open(&end.namespace)?;
    namespace.enter(|| {
        let tap = tap::open(&end.interface, 0)?;
        fcntl(&tap, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .during(|| format!("prepare the TAP {}", end.interface))?;
        Ok(tap)
    })?
}

/// Carries the frames of one direction.
struct Carrier {
    started: Instant,
    link: Mutex<Direction>,
    counters: Counters,
}

/// A frame on its way.
struct Frame {
    due: Duration,
    bytes: Vec<u8>,
}

impl Carrier {
    fn carry(&self, input: &File, output: &File) {
        // Makes sleeps end on time, without the kernel's slack. If it fails, they end later, which
        // is measured.
        let _ = nix::sys::prctl::set_timerslack(1);
        let mut flying: VecDeque<Frame> = VecDeque::new();
        let mut spare: Vec<Vec<u8>> = Vec::new();
        let mut read_at = Duration::ZERO;
        let mut credit = Duration::ZERO;
        loop {
            let mut batch = 0;
            while batch < BATCH_FRAMES {
                let mut bytes = spare.pop().unwrap_or_else(|| vec![0; FRAME_BYTES_MAX]);
                bytes.resize(FRAME_BYTES_MAX, 0);
                let length = match (&*input).read(&mut bytes) {
                    Ok(length) => length,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(_) => {
                        // WouldBlock: no more frames. Other errors: the interface is down.
                        spare.push(bytes);
                        break;
                    }
                };
                batch += 1;
                bytes.truncate(length);
                let now = self.started.elapsed();
                let since = now.saturating_sub(credit).max(read_at);
                self.offer(since..now, bytes, &mut flying, &mut spare);
            }
            let now = self.started.elapsed();
            if batch < BATCH_FRAMES {
                read_at = now;
                credit = Duration::ZERO;
            }
            self.deliver(output, &mut flying, &mut spare);
            if batch == BATCH_FRAMES {
                continue;
            }
            credit = wait(input, self.started, flying.front().map(|frame| frame.due));
        }
    }

    fn offer(
        &self,
        came: Range<Duration>,
        bytes: Vec<u8>,
        flying: &mut VecDeque<Frame>,
        spare: &mut Vec<Vec<u8>>,
    ) {
        let counters = &self.counters;
        counters.offered_frames.add(1);
        counters.offered_bytes.add(bytes.len() as u64);
        let fate = self.lock().offer(came.start, came.end, bytes.len());
        match fate {
            Fate::Arrives(due) => flying.push_back(Frame { due, bytes }),
            Fate::Dropped(why) => {
                counters.dropped(why).add(1);
                spare.push(bytes);
            }
        }
    }

    fn deliver(&self, output: &File, flying: &mut VecDeque<Frame>, spare: &mut Vec<Vec<u8>>) {
        let mut now = self.started.elapsed();
        while flying.front().is_some_and(|frame| frame.due <= now) {
            let Some(frame) = flying.pop_front() else {
                break;
            };
            if self.lock().is_cut(now) {
                self.counters.dropped(Drop::Cut).add(1);
            } else if (&*output).write(&frame.bytes).is_ok() {
                self.counters.carried_frames.add(1);
                self.counters.carried_bytes.add(frame.bytes.len() as u64);
                self.counters.late(now.saturating_sub(frame.due));
            } else {
                self.counters.refused.add(1);
            }
            spare.push(frame.bytes);
            now = self.started.elapsed();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Direction> {
        // No holder of the lock panics half-way through a change.
        self.link
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Waits until a frame arrives or is due; returns by how much the wake-up was late.
fn wait(input: &File, started: Instant, due: Option<Duration>) -> Duration {
    let now = started.elapsed();
    let deadline = match due {
        Some(due) => due.max(now + NAP).min(now + SLEEP_MAX),
        None => now + SLEEP_MAX,
    };
    let mut files = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    let woken = ppoll(
        &mut files,
        Some(TimeSpec::from_duration(deadline - now)),
        None,
    );
    let late = started.elapsed().saturating_sub(deadline);
    match woken {
        Ok(_) => late.min(CREDIT_MAX),
        Err(_) => Duration::ZERO,
    }
}

/// Answers requests, one connection after the other, until the process ends.
fn serve(listener: &UnixListener, directions: &[Arc<Carrier>; 2]) {
    for stream in listener.incoming().flatten() {
        // A silent client must not block the others forever.
        let limit = Some(Duration::from_secs(5));
        if stream.set_read_timeout(limit).is_ok() && stream.set_write_timeout(limit).is_ok() {
            // A client that leaves before its answer needs none.
            let _ = answer(&stream, directions);
        }
    }
}

fn answer(stream: &UnixStream, directions: &[Arc<Carrier>; 2]) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream.take(65_536)).read_line(&mut line)?;
    let reply = match serde_json::from_str(&line) {
        Ok(request) => apply(&request, directions),
        Err(error) => Reply::Failed(error.to_string()),
    };
    let mut bytes = serde_json::to_vec(&reply)?;
    bytes.push(b'\n');
    (&*stream).write_all(&bytes)
}

fn apply(request: &Request, directions: &[Arc<Carrier>; 2]) -> Reply {
    for carrier in directions {
        let now = carrier.started.elapsed();
        match request {
            Request::Stats => {}
            Request::Change(spec) => carrier.lock().change(*spec),
            Request::CutMs(ms) => carrier.lock().cut(now + Duration::from_millis(*ms)),
            Request::Heal => carrier.lock().cut(Duration::ZERO),
        }
    }
    match request {
        Request::Stats => Reply::Stats(Box::new(LinkStats {
            forth: directions[0].counters.read(),
            back: directions[1].counters.read(),
        })),
        _ => Reply::Done,
    }
}

#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of one direction.
#[derive(Debug, Default)]
struct Counters {
    offered_frames: Counter,
    offered_bytes: Counter,
    carried_frames: Counter,
    carried_bytes: Counter,
    dropped_cut: Counter,
    dropped_loss: Counter,
    dropped_queue: Counter,
    refused: Counter,
    lateness: Mutex<Lateness>,
}

impl Counters {
    fn dropped(&self, why: Drop) -> &Counter {
        match why {
            Drop::Cut => &self.dropped_cut,
            Drop::Loss => &self.dropped_loss,
            Drop::Queue => &self.dropped_queue,
        }
    }

    fn late(&self, by: Duration) {
        if let Ok(mut lateness) = self.lateness.lock() {
            lateness.add(by);
        }
    }

    fn read(&self) -> DirectionStats {
        DirectionStats {
            offered_frames: self.offered_frames.read(),
            offered_bytes: self.offered_bytes.read(),
            carried_frames: self.carried_frames.read(),
            carried_bytes: self.carried_bytes.read(),
            dropped_cut: self.dropped_cut.read(),
            dropped_loss: self.dropped_loss.read(),
            dropped_queue: self.dropped_queue.read(),
            refused: self.refused.read(),
            lateness: self
                .lateness
                .lock()
                .map(|it| it.clone())
                .unwrap_or_default(),
        }
    }
}
