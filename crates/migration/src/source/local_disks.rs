//! The disks that a guest takes along: which they are, and how each of them moves.

use crate::context::Context;
use crate::disks::{base_images, blocks_of, exports, qcow2, read_blocks};
use crate::host::writable;
use crate::source::sender::Sending;
use longhaul_api::{ApiError, BaseChoice, DiskChoice, DiskReport, ErrorCode};
use longhaul_engine::choose::{Choice, Seen, Why, choose};
use longhaul_engine::source::{Source, SourceError};
use longhaul_engine::strategy::{Before, Promise, Strategy};
use longhaul_hypervisor::config::ImageFormat;
use longhaul_hypervisor::disk_rate;
use longhaul_hypervisor::guest::Guest;
use longhaul_hypervisor::has_open;
use longhaul_hypervisor::qmp::{Qmp, QmpError};
use longhaul_image::ImageId;
use longhaul_protocol::disk::{DiskFormat, OfferedDisk, Pulled};
use longhaul_protocol::guest::{Disk as Described, GuestDescription};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use longhaul_storage::disk::{Disk as _, ExportSize, RawDisk};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Holes are looked for in pieces of so many bytes: meanwhile the guest's writes wait to be
/// reported.
const HOLES_BYTES: u64 = 1 << 30;
/// Blocks that are looked at to guess what a disk costs.
const SAMPLES: u64 = 128;
/// Holes and data that one look may find.
const HOLES_MAX: usize = 4096;

/// A disk that moves with its guest.
#[derive(Clone)]
pub(crate) struct LocalDisk {
    pub(crate) spec: RegionSpec,
    pub(crate) strategy: Strategy,
    /// Why it was chosen, where the agent has chosen it.
    pub(crate) why: Option<Why>,
    pub(crate) offered: OfferedDisk,
    pub(crate) image: PathBuf,
    pub(crate) disk: Arc<RawDisk>,
    /// What the guest writes to it on average, in bytes per second.
    usually_written: f64,
}

/// The file of an image has become longer than its region.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "its image has grown by more than was to be expected while it moves: was a snapshot made of \
     it, or did \
     it get larger? The next move begins with its new size"
)]
pub(crate) struct Outgrown;

/// What is known of a link and of what a guest writes, for the choice of strategies.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    pub(crate) link_bytes_per_s: Option<f64>,
    pub(crate) rtt: Duration,
    /// Bytes per second, by the disk's name: now, and on average since its QEMU started.
    pub(crate) written: BTreeMap<String, f64>,
    usually_written: BTreeMap<String, f64>,
    /// The process of the guest's QEMU.
    pid: i32,
    /// What disks stand on in it, by their names.
    stands_on: BTreeMap<String, base_images::Seen>,
}

impl Known {
    /// Looks at what a guest's disks stand on, and at what it writes, where anything depends on it.
    /// What it writes is nothing where that cannot be told.
    pub(crate) async fn of(running: &Guest, choice: DiskChoice, qmp: &Qmp) -> Self {
        let guest = running.description();
        let mut known = Self {
            pid: running.pid().unwrap_or(-1),
            ..Self::default()
        };
        if choice == DiskChoice::Shared {
            return known;
        }
        for disk in guest.disks.iter().filter(|disk| disk.is_local()) {
            let seen = base_images::ask(running, qmp, &disk.name).await;
            known.stands_on.insert(disk.name.clone(), seen);
        }
        if !guest.disks.iter().any(Described::is_local) {
            return known;
        }
        match average(running, qmp).await {
            Ok(written) => known.usually_written = by_disk(guest, &written),
            Err(error) => {
                tracing::warn!(%error, "cannot tell what a guest usually writes to its disks")
            }
        }
        if choice == DiskChoice::Auto {
            match disk_rate::measure(qmp).await {
                Ok(written) => known.written = by_disk(guest, &written),
                Err(error) => {
                    tracing::warn!(%error, "cannot tell what a guest writes to its disks")
                }
            }
        }
        known
    }

    /// What the link is known to carry, within a limit in bits per second, and its round trip.
    pub(crate) fn limit(&mut self, rate: Option<f64>, limit_bps: Option<u64>, rtt: Duration) {
        let limit = limit_bps.map(|limit| limit as f64 / 8.0);
        self.link_bytes_per_s = match (rate, limit) {
            (Some(rate), Some(limit)) => Some(rate.min(limit)),
            (rate, limit) => rate.or(limit),
        };
        self.rtt = rtt;
    }

    fn seen(&self, disk: &Described) -> Seen {
        let written = self.written.get(&disk.name);
        Seen {
            shared: false,
            written_bytes_per_s: written.copied().unwrap_or(0.0),
            // QEMU does not count by place.
            again_share: 0.0,
            link_bytes_per_s: self.link_bytes_per_s,
            rtt: self.rtt,
        }
    }
}

/// What a guest has written to each of its disks in a second, since its QEMU started; nothing of
/// one that has ended.
async fn average(running: &Guest, qmp: &Qmp) -> Result<BTreeMap<String, f64>, QmpError> {
    match &running.record().process {
        Some(process) => disk_rate::average(qmp, process.age()).await,
        None => Ok(BTreeMap::new()),
    }
}

/// What is known by the paths of devices, by the names of their disks.
fn by_disk(guest: &GuestDescription, of_device: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let written = |disk: &Described| {
        let device = exports::device(guest, &disk.name).ok()?;
        Some((disk.name.clone(), *of_device.get(&device)?))
    };
    guest.disks.iter().filter_map(written).collect()
}

/// The disks of a guest that move with it, after so many regions of memory.
pub(crate) fn local(
    context: &Context,
    guest: &GuestDescription,
    asked: DiskChoice,
    known: &Known,
    memory_regions: usize,
) -> Result<Vec<LocalDisk>, ApiError> {
    if asked == DiskChoice::Shared {
        return Ok(Vec::new());
    }
    let disks = guest.disks.iter().filter(|disk| disk.is_local());
    let local = disks.enumerate().map(|(n, described)| {
        let region = RegionId((memory_regions + n) as u16);
        let (strategy, why) = match strategy(asked) {
            Some(strategy) => (strategy, None),
            None => {
                let Choice { strategy, why } = choose(&known.seen(described), &can());
                (strategy, Some(why))
            }
        };
        open(context, described, region, (strategy, why), known)
    });
    local.collect()
}

/// The strategy that was asked for, if that is one.
fn strategy(choice: DiskChoice) -> Option<Strategy> {
    match choice {
        DiskChoice::Auto | DiskChoice::Shared => None,
        DiskChoice::Precopy => Some(Strategy::PRECOPY),
        DiskChoice::Mirror => Some(Strategy::MIRROR),
        DiskChoice::Hybrid => Some(Strategy::HYBRID),
        DiskChoice::Postcopy => Some(Strategy::POSTCOPY),
    }
}

/// The strategies that agents choose from. With all others the guest needs both hosts for a while
/// after it has moved: who wants that says so.
fn can() -> Vec<Strategy> {
    let all = DiskChoice::ALL.into_iter().filter_map(strategy);
    all.filter(|it| it.promise == Promise::Everything).collect()
}

fn open(
    context: &Context,
    described: &Described,
    region: RegionId,
    (strategy, why): (Strategy, Option<Why>),
    known: &Known,
) -> Result<LocalDisk, ApiError> {
    let name = &described.name;
    let refused = |text: String| ApiError::new(ErrorCode::Refused, text);
    let images = &context.parts.config.hypervisor.images;
    let image = images.get(&described.image).ok_or_else(|| {
        let text = format!(
            "this host does not know the image {} any more",
            described.image
        );
        refused(text).hint("name it under [images] in the agent's configuration")
    })?;
    writable::check(&image.path).map_err(|unwritable| {
        refused(format!("disk {name}: {}", unwritable.text)).hint(unwritable.hint)
    })?;
    let (format, size, base) = match image.format {
        ImageFormat::Raw => (DiskFormat::Raw, ExportSize::OfFile, None),
        ImageFormat::Qcow2 => {
            let growing = qcow2::look(name, &image.path)?;
            let unknown = Err("what it stands on in its QEMU is not known".to_owned());
            let seen = known.stands_on.get(name).unwrap_or(&unknown);
            let state = &context.parts.config.state;
            let base = base_images::look(state, name, growing.backing.as_ref(), (seen, known.pid))?;
            (growing.format, ExportSize::Bytes(growing.longest), base)
        }
    };
    let disk = RawDisk::open(&image.path, size)
        .map_err(|error| refused(format!("disk {name}: {error}")))?;
    let looked = disk.file().metadata();
    let file = looked.map_err(|error| refused(format!("disk {name}: {error}")))?;
    let used = has_open(known.pid, &file);
    let used = used.map_err(|error| {
        refused(format!(
            "disk {name}: cannot tell which file its QEMU uses: {error}"
        ))
    })?;
    if !used {
        let text = format!(
            "disk {name}: {} is not the file that its QEMU uses: it was replaced since, or is \
             another one",
            image.path.display()
        );
        let hint = "give the file that QEMU uses its name back, or shut the guest down: what it \
                    writes now is in a file without this name";
        return Err(refused(text).hint(hint));
    }
    let image_bytes = disk.size_bytes();
    if image_bytes == 0 {
        return Err(refused(format!(
            "disk {name} is empty: there is nothing to move"
        )));
    }
    let spec = RegionSpec {
        id: region,
        name: name.clone(),
        blocks: blocks_of(image_bytes),
        durable: true,
        // It is made for the guest there.
        starts_zero: true,
    };
    let allocated_bytes = match file.is_file() {
        true => (file.blocks() * 512).min(image_bytes),
        false => image_bytes,
    };
    Ok(LocalDisk {
        offered: OfferedDisk {
            region,
            name: name.clone(),
            image_bytes,
            allocated_bytes,
            format,
            pulled: pulled(strategy),
            base,
        },
        spec,
        strategy,
        why,
        image: image.path.clone(),
        disk: Arc::new(disk),
        usually_written: known.usually_written.get(name).copied().unwrap_or(0.0),
    })
}

/// What a strategy leaves at the source.
fn pulled(strategy: Strategy) -> Pulled {
    match (strategy.promise, strategy.before) {
        (Promise::Everything | Promise::Nothing, _) => Pulled::Nothing,
        (Promise::List, Before::Nothing) => Pulled::All,
        (Promise::List, _) => Pulled::Often,
    }
}

impl LocalDisk {
    /// Whether its image grows.
    pub(crate) fn grows(&self) -> bool {
        matches!(self.offered.format, DiskFormat::Qcow2(_))
    }

    /// What of it must be at the destination before the guest runs there, though all else may be
    /// left: in an image that grows what QEMU opens it with. To be asked when QEMU has let go of
    /// it.
    pub(crate) fn promised(&self) -> io::Result<Vec<BlockRange>> {
        match self.grows() && self.strategy.promise == Promise::List {
            true => qcow2::opened_with(&*self.disk),
            false => Ok(Vec::new()),
        }
    }

    /// How long its image is now; an error when it has become longer than its region.
    pub(crate) fn image_bytes(&self) -> io::Result<u64> {
        let bytes = self.disk.file_bytes()?;
        match bytes <= self.offered.image_bytes {
            true => Ok(bytes),
            false => Err(io::Error::other(Outgrown)),
        }
    }

    /// How many blocks its image has now: behind them are zeros.
    pub(crate) fn image_blocks(&self) -> u64 {
        self.image_bytes().map_or(self.spec.blocks, blocks_of)
    }

    /// What of it will probably travel, in bytes: as a few of its blocks look.
    pub(crate) fn probable_bytes(&self) -> u64 {
        let blocks = self.image_blocks();
        let step = (blocks / SAMPLES).max(1);
        let (mut content, mut block) = (Vec::new(), [0; BLOCK_SIZE]);
        for at in (0..blocks).step_by(step as usize) {
            let read = read_blocks(&self.disk, BlockRange::new(at, 1), &mut block);
            if read.is_ok() && !longhaul_codec::is_zero(&block) {
                content.extend_from_slice(&block);
            }
        }
        let frames = content.chunks(64 * BLOCK_SIZE);
        let packed =
            frames.map(|frame| longhaul_codec::pack(frame).map_or(frame.len(), |p| p.len()));
        let share = packed.sum::<usize>() as f64 / content.len().max(1) as f64;
        (self.offered.allocated_bytes as f64 * share) as u64
    }

    /// How it moves, as people choose it.
    pub(crate) fn choice(&self) -> DiskChoice {
        let is_it = |choice: &DiskChoice| choice.name() == self.strategy.name;
        DiskChoice::ALL.into_iter().find(is_it).unwrap_or_default()
    }

    /// Why so, where the agent has chosen it.
    pub(crate) fn why(&self) -> Option<String> {
        self.why.map(|why| why.to_string())
    }

    /// As a report has it.
    pub(crate) fn report(&self) -> DiskReport {
        DiskReport {
            name: self.spec.name.clone(),
            strategy: self.choice(),
            why: self.why(),
            image_bytes: self.shown_bytes(),
            allocated_bytes: self.offered.allocated_bytes,
            base: self.base().map(|id| id.to_string()),
            base_choice: self.offered.base.as_ref().map(|base| match base.lazily {
                true => BaseChoice::Lazy,
                false => BaseChoice::Whole,
            }),
        }
    }

    /// Whether it moves only when all of its base image is at the destination.
    pub(crate) fn awaits_base(&self) -> bool {
        self.offered.base.as_ref().is_some_and(|base| !base.lazily)
    }

    /// The base image that it stands on.
    pub(crate) fn base(&self) -> Option<ImageId> {
        self.offered.base.as_ref().map(base_images::id_of)
    }

    /// How long its image is, for people.
    pub(crate) fn shown_bytes(&self) -> u64 {
        self.image_bytes().unwrap_or(self.offered.image_bytes)
    }

    /// Tells the engine of holes, which need not travel. Writes must be reported by now: what is a
    /// hole while the engine is held, and is written after that, is reported after that.
    pub(crate) fn tell_holes(&self, sending: &Sending) -> io::Result<()> {
        let size = self.disk.size_bytes();
        let mut at = 0;
        while at < size {
            let mut engine = sending.engine();
            let end = (at + HOLES_BYTES).min(size);
            for extent in self.disk.extents(at..end, HOLES_MAX)? {
                let behind = at + extent.length_bytes;
                // A part of the last block is all that the disk has of it.
                let end = if behind == size {
                    blocks_of(size)
                } else {
                    behind / BLOCK
                };
                let first = at.div_ceil(BLOCK);
                if extent.hole && first < end {
                    let range = BlockRange::new(first, end - first);
                    engine.hole(self.spec.id, range).map_err(io::Error::other)?;
                }
                at = behind;
            }
        }
        Ok(())
    }
}

/// Adds disks to what an engine moves.
pub(crate) fn add(engine: &mut Source, disks: &[LocalDisk]) -> Result<(), SourceError> {
    let pulled = |disk: &&LocalDisk| disk.offered.pulled != Pulled::Nothing;
    let usually_written = disks.iter().filter(pulled).map(|disk| disk.usually_written);
    engine.is_usually_written(usually_written.sum());
    disks
        .iter()
        .try_for_each(|disk| engine.add(&disk.spec, disk.strategy))
}

/// Whether something of a disk may be left when its guest goes on elsewhere.
pub(crate) fn may_be_left(disk: &LocalDisk) -> bool {
    disk.strategy.promise == Promise::List
}
