//! Simulates one move in simulated time: a guest with memory and a disk, and a link that both
//! share.

use crate::workload::{FILE_BLOCKS, Request, Workload};
use longhaul_codec::{Decision, Digest, Staged};
use longhaul_engine::presence::{Begin, Operation, Output, Presence, RequestId};
use longhaul_engine::source::{Advice, Answer, Link, Source, Unseen, WriteId};
use longhaul_engine::stop::Wish;
use longhaul_engine::strategy::{Promise, Strategy};
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BlockRange, Epoch, RegionId, RegionSpec};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

const MEMORY: RegionId = RegionId(0);
const DISK: RegionId = RegionId(1);
/// 117 MB/s in the paper, at a 32nd.
const RATE: f64 = 117e6 / 32.0;
const STEP_S: f64 = 0.001;
/// Limit on the duration of a move.
const LIMIT_S: f64 = 900.0;
/// Duration of loading, device state and journals.
const LOAD_S: f64 = 0.1;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) strategy: Strategy,
    pub(crate) workload: Workload,
    pub(crate) rtt_s: f64,
    pub(crate) share: Option<(f64, f64)>,
    pub(crate) memory_blocks: u64,
    /// Whether the disk holds only the file that is written.
    pub(crate) file_only: bool,
    /// Blocks of memory that the guest writes per second, all within a tenth of it.
    pub(crate) memory_per_s: f64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    /// From the beginning until the source may be deleted.
    pub(crate) seconds: f64,
    pub(crate) bytes: f64,
    /// The downtime.
    pub(crate) downtime: f64,
    /// The guest's throughput, as a share of its throughput without a move.
    pub(crate) throughput: f64,
}

/// A message and when it arrives.
type Wire<T> = VecDeque<(f64, T)>;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Guest {
    Here,
    /// Stopped, since that time.
    Still(f64),
    There,
}

enum Doing {
    Nothing,
    /// It begins later.
    Later(Request),
    /// The disk is busy with it until then.
    Busy(Request, f64),
    /// It waits for the other host.
    Waits(Request),
}

pub(crate) struct Move {
    setting: Setting,
    now: f64,
    source: Source,
    presence: Presence,
    versions: [Vec<u64>; 2],
    dirty: BTreeSet<u64>,
    dirty_debt: f64,
    guest: Guest,
    /// Whether the guest issues no more requests here.
    stopping: bool,
    stream: crate::workload::Stream,
    doing: Doing,
    requests: u64,
    done_bytes: f64,
    link_free_at: f64,
    frames: Wire<(u64, Vec<u64>, bool)>,
    acks: Wire<u64>,
    wants: Wire<(bool, BlockRange)>,
    bytes: f64,
    downtime: f64,
    ready_at: Option<f64>,
}

/// Returns the guest's throughput in this many seconds without a move, in bytes.
pub(crate) fn undisturbed(workload: Workload, seconds: f64) -> f64 {
    let mut stream = workload.stream();
    let (mut now, mut bytes) = (0.0, 0.0);
    loop {
        let request = stream.next();
        now = f64::max(now, request.not_before) + request.seconds;
        if now > seconds {
            return bytes;
        }
        bytes += (request.blocks.end - request.blocks.start) as f64 * 4096.0;
    }
}

impl Move {
    pub(crate) fn new(setting: Setting) -> Self {
        let disk_blocks = FILE_BLOCKS * if setting.file_only { 1 } else { 2 };
        let spec = |id, blocks, durable| RegionSpec {
            id,
            name: String::new(),
            blocks,
            durable,
            starts_zero: false,
        };
        let wish = Wish::downtime(Duration::from_millis(500));
        let ram = spec(MEMORY, setting.memory_blocks, false);
        let overhead = Duration::from_secs_f64(LOAD_S);
        let mut source = Source::new(Strategy::PRECOPY, &[ram], wish, overhead).unwrap();
        source
            .add(&spec(DISK, disk_blocks, true), setting.strategy)
            .unwrap();
        if let Some((first, later)) = setting.share {
            source.share_background(first, later);
        }
        source.pass_started(Duration::ZERO, true);
        source.pass_read();
        Self {
            now: 0.0,
            source,
            presence: Presence::new(DISK, disk_blocks),
            versions: [
                vec![1; setting.memory_blocks as usize],
                vec![1; disk_blocks as usize],
            ],
            dirty: BTreeSet::new(),
            dirty_debt: 0.0,
            guest: Guest::Here,
            stopping: false,
            stream: setting.workload.stream(),
            doing: Doing::Nothing,
            requests: 0,
            done_bytes: 0.0,
            link_free_at: 0.0,
            frames: VecDeque::new(),
            acks: VecDeque::new(),
            wants: VecDeque::new(),
            bytes: 0.0,
            downtime: 0.0,
            ready_at: None,
            setting,
        }
    }

    pub(crate) fn run(mut self) -> Outcome {
        while self.now < LIMIT_S && !self.is_over() {
            self.now += STEP_S;
            self.deliver();
            self.write_memory();
            self.work();
            self.control();
            self.send();
        }
        let could = undisturbed(self.setting.workload, self.now).max(1.0);
        Outcome {
            seconds: self.now,
            bytes: self.bytes,
            downtime: self.downtime,
            throughput: self.done_bytes / could,
        }
    }

    fn is_over(&self) -> bool {
        let nothing = self.source.is_drained() && self.presence.missing_blocks() == 0;
        self.guest == Guest::There && nothing
    }

    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    /// Delivers everything that has arrived by now, on either host.
    fn deliver(&mut self) {
        while let Some((seq, disk, _)) = due(&mut self.frames, self.now) {
            for block in disk {
                if self.presence.accepts(Epoch(1), block, seq) {
                    self.presence.arrived(BlockRange::new(block, 1), seq);
                }
            }
            self.acks
                .push_back((self.now + self.setting.rtt_s / 2.0, seq));
        }
        while let Some(seq) = due(&mut self.acks, self.now) {
            let applied = vec![(seq, 1)];
            let message = Acknowledgement {
                applied,
                rejected: Vec::new(),
                ..Acknowledgement::default()
            };
            self.source.acknowledged(&message).unwrap();
        }
        while let Some((want, range)) = due(&mut self.wants, self.now) {
            if want {
                self.source.wanted(DISK, range).unwrap();
            } else {
                self.source.superseded(DISK, range).unwrap();
            }
        }
        while let Some(output) = self.presence.poll() {
            let at = self.now + self.setting.rtt_s / 2.0;
            match output {
                Output::Go(..) => {
                    if let Doing::Waits(request) =
                        std::mem::replace(&mut self.doing, Doing::Nothing)
                    {
                        let until = self.now + request.seconds;
                        self.doing = Doing::Busy(request, until);
                    }
                }
                Output::Want(range) => self.wants.push_back((at, (true, range))),
                Output::Superseded(range) => self.wants.push_back((at, (false, range))),
                _ => {}
            }
        }
        while let Some(WriteId(_)) = self.source.poll_answer() {
            if let Doing::Waits(request) = std::mem::replace(&mut self.doing, Doing::Nothing) {
                self.finish(&request);
            }
        }
    }

    fn write_memory(&mut self) {
        if self.guest != Guest::Here {
            return;
        }
        self.dirty_debt += self.setting.memory_per_s * STEP_S;
        while self.dirty_debt >= 1.0 {
            self.dirty_debt -= 1.0;
            let block = (self.now * 1e6) as u64 * 7919 % (self.setting.memory_blocks / 10);
            self.versions[0][block as usize] += 1;
            self.dirty.insert(block);
        }
    }

    /// Runs the guest's requests, one after the other.
    fn work(&mut self) {
        loop {
            match std::mem::replace(&mut self.doing, Doing::Nothing) {
                Doing::Busy(request, until) if until <= self.now => self.complete(request, until),
                Doing::Later(request) if request.not_before <= self.now && !self.is_still() => {
                    self.begin(request, self.now);
                }
                Doing::Nothing if !self.is_still() => {
                    let request = self.stream.next();
                    self.doing = Doing::Later(request);
                }
                waits => {
                    self.doing = waits;
                    return;
                }
            }
        }
    }

    fn is_still(&self) -> bool {
        self.stopping || matches!(self.guest, Guest::Still(_))
    }

    /// Begins a request of the guest at that time.
    fn begin(&mut self, request: Request, from: f64) {
        self.requests += 1;
        if self.guest == Guest::There {
            let operation = match request.write {
                true => Operation::Write,
                false => Operation::Read,
            };
            let bytes = request.blocks.start * 4096..request.blocks.end * 4096;
            let id = RequestId(self.requests);
            if self.presence.begin(id, operation, bytes).unwrap() == Begin::Wait {
                self.doing = Doing::Waits(request);
                return;
            }
        }
        let until = from + request.seconds;
        self.doing = Doing::Busy(request, until);
    }

    /// Completes a request at the disk.
    fn complete(&mut self, request: Request, until: f64) {
        if request.write && self.guest != Guest::There {
            let count = request.blocks.end - request.blocks.start;
            let range = BlockRange::new(request.blocks.start, count);
            for block in range.blocks() {
                self.versions[1][block as usize] += 1;
            }
            let id = WriteId(self.requests);
            if self.source.written_by(DISK, range, id).unwrap() == Answer::Later {
                self.doing = Doing::Waits(request);
                return;
            }
        }
        if self.guest == Guest::There {
            self.presence.done(RequestId(self.requests), true);
        }
        self.finish(&request);
        // The next request begins when this one ended, not a step later.
        if !self.is_still() {
            let next = self.stream.next();
            if next.not_before > until {
                self.doing = Doing::Later(next);
            } else {
                self.begin(next, until);
            }
        }
    }

    fn finish(&mut self, request: &Request) {
        self.done_bytes += (request.blocks.end - request.blocks.start) as f64 * 4096.0;
    }

    fn control(&mut self) {
        let queued_bytes = self.source.in_flight_bytes();
        self.source.link(Link {
            rate_bytes_per_s: RATE,
            rtt: Duration::from_secs_f64(self.setting.rtt_s),
            queued_bytes,
        });
        match self.guest {
            Guest::Here => self.watch(),
            Guest::Still(since) => self.hand_over(since),
            Guest::There => {}
        }
    }

    fn watch(&mut self) {
        self.source.unseen(Some(Unseen {
            written_blocks: self.dirty.len() as u64,
            unread_blocks: 0,
            at: self.now(),
        }));
        match self.source.advise(self.now()) {
            Advice::ReadPass => {
                self.source.pass_started(self.now(), false);
                self.report();
                self.source.pass_read();
            }
            // QEMU waits for the guest's pending requests.
            Advice::Stop(_) if matches!(self.doing, Doing::Nothing | Doing::Later(_)) => {
                self.guest = Guest::Still(self.now);
                self.stopping = true;
                self.report();
                self.source.frozen();
                self.source.closed();
            }
            Advice::Stop(_) => self.stopping = true,
            _ => {}
        }
    }

    fn report(&mut self) {
        for block in std::mem::take(&mut self.dirty) {
            self.source
                .written(MEMORY, BlockRange::new(block, 1))
                .unwrap();
        }
    }

    fn hand_over(&mut self, since: f64) {
        let complete = self.source.advise(self.now()) == Advice::Complete;
        if self.ready_at.is_none() && complete && self.frames.iter().all(|(_, f)| !f.2) {
            let mut next = Some(0);
            while let Some(from) = next {
                let list = self.source.list(DISK, from, 1000).unwrap().unwrap();
                next = list.next_chunk;
                self.presence.listed(&list).unwrap();
            }
            self.ready_at = Some(self.now + LOAD_S + 1.5 * self.setting.rtt_s);
        }
        if self.ready_at.is_some_and(|at| self.now >= at) {
            self.presence.seal();
            self.source.handed_over();
            self.guest = Guest::There;
            self.stopping = false;
            self.downtime = self.now - since;
        }
    }

    /// Fills the link up to its window.
    fn send(&mut self) {
        if self.ready_at.is_some() && self.guest != Guest::There {
            return;
        }
        let window = 2.0 * RATE * self.setting.rtt_s + 512e3 / 8.0;
        while (self.source.in_flight_bytes() as f64) < window {
            let Some(batch) = self.source.take(16).unwrap() else {
                return;
            };
            let content = |id: &longhaul_codec::BlockId| {
                let version = self.versions[usize::from(id.region.0)][id.block as usize];
                let mut digest = [0; 16];
                digest[..8]
                    .copy_from_slice(&(id.block << 1 | u64::from(id.region.0)).to_le_bytes());
                digest[8..].copy_from_slice(&version.to_le_bytes());
                Staged::Content(Digest(digest))
            };
            let staged: Vec<Staged> = batch.blocks.iter().map(content).collect();
            let decisions = self.source.decide(&batch, &staged);
            let sent = decisions.iter().filter(|d| !matches!(d, Decision::Skip));
            let bytes = sent.count() * 4096;
            self.source.encoded(&batch, (bytes > 0).then_some(bytes));
            if bytes == 0 {
                continue;
            }
            self.bytes += bytes as f64;
            self.link_free_at = f64::max(self.link_free_at, self.now) + bytes as f64 / RATE;
            let of_disk = batch.blocks.iter().filter(|id| id.region == DISK);
            let disk: Vec<u64> = of_disk.map(|id| id.block).collect();
            let promised = self.setting.strategy.promise == Promise::Everything;
            let must = promised || disk.is_empty();
            let at = self.link_free_at + self.setting.rtt_s / 2.0;
            self.frames.push_back((at, (batch.seq, disk, must)));
        }
    }
}

fn due<T>(wire: &mut Wire<T>, now: f64) -> Option<T> {
    let is_due = wire.front().is_some_and(|(at, _)| *at <= now);
    if is_due {
        wire.pop_front().map(|(_, item)| item)
    } else {
        None
    }
}
