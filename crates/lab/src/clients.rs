//! Clients of a guest that serves an echo and a download, outside the guest: they check every byte,
//! and see the gaps in their service.

use crate::error::LabError;
use crate::netns::Namespace;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Between two words, and between two datagrams.
pub const EVERY: Duration = Duration::from_millis(5);
const GUEST: &str = "10.78.0.2";
const ECHO: u16 = 7;
const DOWNLOAD: u16 = 19;
/// A client gives up a connection on which nothing comes for this time.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest may take to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(300);
/// How long the last datagrams are awaited.
const LAST_WITHIN: Duration = Duration::from_secs(5);
/// The rate of a steady download, in bytes per second.
const STEADY_BYTES_PER_S: u64 = 1_000_000;

/// What a client saw.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// The longest time without an answer.
    pub longest_gap: Duration,
    /// Datagrams that did not come back.
    pub lost: u64,
    /// Datagrams that came back twice.
    pub twice: u64,
}

/// What a client and its owner tell each other.
#[derive(Debug, Default)]
pub struct Told {
    stop: AtomicBool,
    answers: AtomicU64,
    bytes: AtomicU64,
}

impl Told {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn answered(&self, bytes: usize) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// What a client does until it is told to stop; it counts its answers.
pub type Loop = fn(&Told) -> io::Result<Seen>;

/// A client that runs.
#[derive(Debug)]
pub struct Client {
    told: Arc<Told>,
    thread: JoinHandle<io::Result<Seen>>,
}

impl Client {
    /// Starts a client in a network.
    ///
    /// # Errors
    /// When the network is gone.
    pub fn start(network: &Namespace, run: Loop) -> Result<Self, LabError> {
        let told = Arc::<Told>::default();
        let network = Namespace::open(network.name())?;
        let tells = told.clone();
        let in_network = move || match network.enter(|| run(&tells)) {
            Ok(seen) => seen,
            Err(error) => Err(io::Error::other(error.to_string())),
        };
        let thread = thread::spawn(in_network);
        Ok(Self { told, thread })
    }

    /// Returns the number of answers so far.
    pub fn answers(&self) -> u64 {
        self.told.answers.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that came so far.
    pub fn bytes(&self) -> u64 {
        self.told.bytes.load(Ordering::Relaxed)
    }

    /// Returns whether its connection broke.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it, and returns what it saw.
    ///
    /// # Errors
    /// When its connection broke, or a byte was wrong.
    pub fn finish(self) -> io::Result<Seen> {
        self.told.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(io::Error::other("a client panicked")))
    }
}

fn connect(port: u16) -> io::Result<TcpStream> {
    let ip = GUEST.parse().map_err(io::Error::other)?;
    let began = Instant::now();
    loop {
        match TcpStream::connect_timeout(&SocketAddr::new(ip, port), Duration::from_secs(1)) {
            Ok(stream) => {
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) if began.elapsed() > LISTENS_WITHIN => return Err(error),
            Err(_) => thread::sleep(EVERY),
        }
    }
}

/// Reads numbers in sequence, as fast as they come.
///
/// # Errors
/// When the connection breaks, or a number is wrong.
pub fn download(told: &Told) -> io::Result<Seen> {
    read_numbers(told, None)
}

/// Reads numbers in sequence, 1 MB a second.
///
/// # Errors
/// When the connection breaks, or a number is wrong.
pub fn steady_download(told: &Told) -> io::Result<Seen> {
    read_numbers(told, Some(STEADY_BYTES_PER_S))
}

fn read_numbers(told: &Told, bytes_per_s: Option<u64>) -> io::Result<Seen> {
    let mut stream = connect(DOWNLOAD)?;
    let (mut buffer, mut place) = (vec![0; 64 << 10], 0u64);
    let began = Instant::now();
    let (mut seen, mut last) = (Seen::default(), began);
    while told.goes_on() {
        let room = bytes_per_s.map_or(buffer.len(), |rate| {
            let due = (began.elapsed().as_secs_f64() * rate as f64) as u64;
            due.saturating_sub(place).min(buffer.len() as u64) as usize
        });
        if room < 8 {
            thread::sleep(EVERY);
            continue;
        }
        let length = stream.read(&mut buffer[..room])?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        for byte in &buffer[..length] {
            let expected = (place / 8).to_le_bytes()[(place % 8) as usize];
            if *byte != expected {
                return Err(io::Error::other(format!("byte {place} is wrong")));
            }
            place += 1;
        }
        seen.longest_gap = seen.longest_gap.max(last.elapsed());
        last = Instant::now();
        told.answered(length);
    }
    Ok(seen)
}

/// Types a word and waits for its echo, again and again.
///
/// # Errors
/// When the connection breaks, or an echo is wrong.
pub fn session(told: &Told) -> io::Result<Seen> {
    let mut stream = connect(ECHO)?;
    let mut seen = Seen::default();
    let mut number = 0u64;
    while told.goes_on() {
        let asked = Instant::now();
        stream.write_all(&number.to_le_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        if answer != number.to_le_bytes() {
            return Err(io::Error::other(format!("word {number} is wrong")));
        }
        number += 1;
        seen.longest_gap = seen.longest_gap.max(asked.elapsed());
        told.answered(answer.len());
        thread::sleep(EVERY);
    }
    Ok(seen)
}

/// Asks one question on each of many connections, one after another, as a client of a web server
/// does.
///
/// # Errors
/// When an answer is wrong, or none comes for long.
pub fn requests(told: &Told) -> io::Result<Seen> {
    let mut seen = Seen::default();
    let (mut number, mut last) = (0u64, Instant::now());
    while told.goes_on() {
        let mut stream = connect(ECHO)?;
        stream.write_all(&number.to_le_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        if answer != number.to_le_bytes() {
            return Err(io::Error::other(format!("answer {number} is wrong")));
        }
        if number > 0 {
            seen.longest_gap = seen.longest_gap.max(last.elapsed());
        }
        last = Instant::now();
        number += 1;
        told.answered(answer.len());
    }
    Ok(seen)
}

/// Sends numbers in sequence, in long pieces, and reads them back.
///
/// # Errors
/// When the connection breaks, or a number is wrong.
pub fn bulk(told: &Told) -> io::Result<Seen> {
    let mut stream = connect(ECHO)?;
    let mut sending = stream.try_clone()?;
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut next = 0u64;
            while told.goes_on() {
                let piece: Vec<u8> = (next..next + 4096).flat_map(u64::to_le_bytes).collect();
                sending.write_all(&piece)?;
                next += 4096;
            }
            sending.shutdown(Shutdown::Write)
        });
        let (mut seen, mut last, mut next) = (Seen::default(), Instant::now(), 0u64);
        let mut answer = [0; 8];
        let mut reader = BufReader::with_capacity(64 << 10, &mut stream);
        loop {
            match reader.read_exact(&mut answer) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            if answer != next.to_le_bytes() {
                return Err(io::Error::other(format!("number {next} is wrong")));
            }
            next += 1;
            if next % 4096 == 0 {
                seen.longest_gap = seen.longest_gap.max(last.elapsed());
                last = Instant::now();
                told.answered(8 * 4096);
            }
        }
        let sent = sender.join();
        sent.unwrap_or_else(|_| Err(io::Error::other("the sender panicked")))?;
        Ok(seen)
    })
}

/// Sends numbered datagrams at a steady pace, and counts which come back.
///
/// # Errors
/// When there is no socket.
pub fn datagrams(told: &Told) -> io::Result<Seen> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect((GUEST, ECHO))?;
    socket.set_nonblocking(true)?;
    let mut came: Vec<u32> = Vec::new();
    let (mut seen, mut last) = (Seen::default(), Instant::now());
    let mut ended: Option<Instant> = None;
    loop {
        // Those that are on their way may come back for a while.
        let all = came.iter().all(|count| *count > 0);
        if ended.is_some_and(|at| all || at.elapsed() > LAST_WITHIN) {
            break;
        }
        if ended.is_none() {
            // The guest may not listen yet, and refuse.
            let _ = socket.send(&(came.len() as u64).to_le_bytes());
            came.push(0);
            ended = (!told.goes_on()).then(Instant::now);
        }
        let mut answer = [0; 8];
        while let Ok(length) = socket.recv(&mut answer) {
            let number = u64::from_le_bytes(answer) as usize;
            if length == 8 && number < came.len() {
                came[number] += 1;
                seen.longest_gap = seen.longest_gap.max(last.elapsed());
                last = Instant::now();
                told.answered(length);
            }
        }
        thread::sleep(EVERY);
    }
    // Before the first answer the guest may not have listened.
    let first = came.iter().position(|count| *count > 0).unwrap_or(0);
    seen.lost = came[first..].iter().filter(|count| **count == 0).count() as u64;
    seen.twice = came.iter().filter(|count| **count > 1).count() as u64;
    Ok(seen)
}
