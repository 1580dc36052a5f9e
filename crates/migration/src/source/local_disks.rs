//! The disks that move with a guest: which they are, and by which strategy each one moves.

use crate::context::Context;
use crate::disks::exports::{self, FrontError};
use crate::disks::{backing_files, base_images, blocks_of, qcow2, read_blocks};
use crate::host::base_image_orders::id_of;
use crate::host::writable;
use crate::source::sender::Sending;
use longhaul_api::{ApiError, BaseChoice, DiskChoice, DiskReport, ErrorCode};
use longhaul_engine::choose::{Choice, Seen, Why, choose};
use longhaul_engine::source::{Source, SourceError};
use longhaul_engine::strategy::{Before, Promise, Strategy};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::config::{Image, ImageFormat};
use longhaul_hypervisor::disk::{self, FindError};
use longhaul_hypervisor::disk_rate;
use longhaul_hypervisor::has_open;
use longhaul_hypervisor::qmp::{Qmp, QmpError};
use longhaul_image::ImageId;
use longhaul_protocol::disk::{Base, DiskFormat, OfferedDisk, Pulled};
use longhaul_protocol::guest::{Disk as Described, GuestDescription};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use longhaul_storage::disk::qcow2::end_bytes;
use longhaul_storage::disk::{Disk as _, ExportSize, RawDisk, is_volume};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes that one search for holes covers. During a search, the guest's writes wait to be reported.
const HOLES_BYTES: u64 = 1 << 30;
/// Number of blocks of a volume that are sampled to estimate how much of it is used.
const VOLUME_SAMPLES: u64 = 1024;
/// Number of holes and data extents that one search may find.
const HOLES_MAX: usize = 4096;

/// A disk that moves with its guest.
#[derive(Clone)]
pub(crate) struct LocalDisk {
    pub(crate) spec: RegionSpec,
    pub(crate) strategy: Strategy,
    /// The reason for the strategy, if the agent has chosen it.
    pub(crate) why: Option<Why>,
    pub(crate) offered: OfferedDisk,
    pub(crate) image: PathBuf,
    pub(crate) disk: Arc<RawDisk>,
    /// Whether the guest only reads it, so that nobody has to report its writes. Other guests of
    /// this host may use the image too: it stays here.
    pub(crate) read_only: bool,
    /// The guest's average write rate, in bytes per second.
    usually_written: f64,
}

/// The error for an image file that has become longer than its region.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "its image has grown by more than was to be expected while it moves: was a snapshot made of \
     it, or did \
     it get larger? The next move begins with its new size"
)]
pub(crate) struct Outgrown;

/// The known properties of a link and of a guest's writes, for the choice of strategies.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    pub(crate) link_bytes_per_s: Option<f64>,
    pub(crate) rtt: Duration,
    /// Current write rates in bytes per second, by the disk's name. `usually_written` has the
    /// averages since QEMU started.
    pub(crate) written: BTreeMap<String, f64>,
    usually_written: BTreeMap<String, f64>,
    /// The sizes that the guest sees, by the disk's name.
    sizes: BTreeMap<String, u64>,
    /// The id of the QEMU process.
    pid: i32,
    /// The base images that QEMU uses for the disks, by the disk's name.
    stands_on: BTreeMap<String, base_images::Seen>,
    /// The disks' devices in QEMU, or why no export can be put below a disk, by the disk's name.
    devices: BTreeMap<String, Result<String, FrontError>>,
}

impl Known {
    /// Finds a guest's disks in its QEMU, their base images, and its write rates, as far as the
    /// choice depends on them. A rate that cannot be measured counts as zero.
    pub(crate) async fn of(
        context: &Context,
        running: &Guest,
        choice: DiskChoice,
        qmp: &Qmp,
    ) -> Self {
        let guest = running.description();
        let mut known = Self {
            pid: running.pid().unwrap_or(-1),
            ..Self::default()
        };
        if choice == DiskChoice::Shared {
            return known;
        }
        let images = context.parts.config.hypervisor.all_images();
        for disk in guest.disks.iter().filter(|disk| disk.is_local()) {
            // An image that is not known is refused by its name.
            let Some(image) = images.get(&disk.image) else {
                continue;
            };
            let of = (&*disk.name, &*image.path);
            // What the move would ask for later: a disk that cannot be had is refused beforehand.
            let found = movable_device(running, qmp, of).await;
            if let Ok(device) = &found {
                let seen = base_images::ask(qmp, device).await;
                known.stands_on.insert(disk.name.clone(), seen);
            }
            known.devices.insert(disk.name.clone(), found);
        }
        if !guest.disks.iter().any(Described::is_local) {
            return known;
        }
        match average(running, qmp).await {
            Ok(written) => known.usually_written = known.by_disk(&written),
            Err(error) => {
                tracing::warn!(%error, "cannot tell what a guest usually writes to its disks")
            }
        }
        match disk_rate::sizes(qmp).await {
            Ok(sizes) => known.sizes = known.by_disk(&sizes),
            Err(error) => tracing::warn!(%error, "cannot tell how large a guest's disks are"),
        }
        if choice == DiskChoice::Auto {
            match disk_rate::measure(qmp).await {
                Ok(written) => known.written = known.by_disk(&written),
                Err(error) => {
                    tracing::warn!(%error, "cannot tell what a guest writes to its disks")
                }
            }
        }
        known
    }

    /// Sets the link's known rate in bytes per second, its limit in bits per second, and its
    /// round-trip time.
    pub(crate) fn limit(&mut self, rate: Option<f64>, limit_bps: Option<u64>, rtt: Duration) {
        let limit = limit_bps.map(|limit| limit as f64 / 8.0);
        self.link_bytes_per_s = match (rate, limit) {
            (Some(rate), Some(limit)) => Some(rate.min(limit)),
            (rate, limit) => rate.or(limit),
        };
        self.rtt = rtt;
    }

    /// Converts values by device path to values by disk name.
    fn by_disk<T: Copy>(&self, of_device: &BTreeMap<String, T>) -> BTreeMap<String, T> {
        let devices = self.devices.iter();
        let written = devices.filter_map(|(disk, device)| {
            let device = device.as_ref().ok()?;
            Some((disk.clone(), *of_device.get(device)?))
        });
        written.collect()
    }

    /// Refuses a disk that no export can be put below.
    fn check(&self, disk: &str) -> Result<(), ApiError> {
        match self.devices.get(disk) {
            Some(Err(error)) => {
                let error = error.clone().into_api();
                let refused = ApiError::new(ErrorCode::Refused, error.message);
                Err(match error.hint {
                    Some(hint) => refused.hint(hint),
                    None => refused,
                })
            }
            Some(Ok(_)) => Ok(()),
            None => {
                let text = format!("disk {disk}: its QEMU was not asked for it");
                Err(ApiError::new(ErrorCode::Refused, text))
            }
        }
    }

    fn seen(&self, disk: &Described) -> Seen {
        let written = self.written.get(&disk.name);
        Seen {
            shared: false,
            written_bytes_per_s: written.copied().unwrap_or(0.0),
            // QEMU does not count writes by their offset.
            again_share: 0.0,
            link_bytes_per_s: self.link_bytes_per_s,
            rtt: self.rtt,
        }
    }
}

/// Returns the average write rates of a guest since its QEMU started, by device. Empty if no
/// process is known.
async fn average(running: &Guest, qmp: &Qmp) -> Result<BTreeMap<String, f64>, QmpError> {
    match running.process() {
        Some(process) => disk_rate::average(qmp, process.age()).await,
        None => Ok(BTreeMap::new()),
    }
}

/// Returns the disks that move with the guest, among them those of read-only images that the
/// destination lacks, by name. The ids of their regions follow those of the memory.
pub(crate) fn local(
    context: &Context,
    guest: &GuestDescription,
    asked: DiskChoice,
    known: &Known,
    (memory, lacking): (&[RegionSpec], &[String]),
) -> Result<Vec<LocalDisk>, ApiError> {
    let local = each(context, guest, asked, known, (memory, lacking));
    local.into_iter().collect()
}

/// Returns each disk that moves with the guest, or why it cannot.
pub(crate) fn each(
    context: &Context,
    guest: &GuestDescription,
    asked: DiskChoice,
    known: &Known,
    (memory, lacking): (&[RegionSpec], &[String]),
) -> Vec<Result<LocalDisk, ApiError>> {
    if asked == DiskChoice::Shared {
        return Vec::new();
    }
    let disks = guest.disks.iter().filter(|disk| disk.is_local());
    // Several drives may have one read-only image.
    let of_image = |image: &String| {
        let mut disks = guest.disks.iter().filter(|disk| disk.moves_if_lacking());
        disks.find(|disk| disk.image == *image)
    };
    let disks = disks.chain(lacking.iter().filter_map(of_image));
    let first = memory.last().map_or(0, |last| last.id.0 + 1);
    let local = (first..).zip(disks).map(|(region, described)| {
        let region = RegionId(region);
        if described.read_only {
            return open_read_only(context, (guest, described), region, known);
        }
        let (strategy, why) = match strategy(asked) {
            Some(strategy) => (strategy, None),
            None => {
                let Choice { strategy, why } = choose(&known.seen(described), &can());
                (strategy, Some(why))
            }
        };
        let of = (guest, described);
        open(context, of, region, (strategy, why), known)
    });
    local.collect()
}

/// Returns the read-only images that the destination lacks as disks of an offer, by name, or why
/// one cannot move along. The numbers of their regions have no meaning.
pub(crate) fn brought(
    context: &Context,
    guest: &GuestDescription,
    known: &Known,
    lacking: &[String],
) -> Result<Vec<OfferedDisk>, ApiError> {
    let disks = each(context, guest, DiskChoice::Auto, known, (&[], lacking));
    let local = guest.disks.iter().filter(|disk| disk.is_local()).count();
    let brought = disks.into_iter().skip(local);
    brought.map(|disk| Ok(disk?.offered)).collect()
}

/// Returns the requested strategy, if the choice is one.
fn strategy(choice: DiskChoice) -> Option<Strategy> {
    match choice {
        DiskChoice::Auto | DiskChoice::Shared => None,
        DiskChoice::Precopy => Some(Strategy::PRECOPY),
        DiskChoice::Mirror => Some(Strategy::MIRROR),
        DiskChoice::Hybrid => Some(Strategy::HYBRID),
        DiskChoice::Postcopy => Some(Strategy::POSTCOPY),
    }
}

/// Returns the strategies that an agent chooses from. With the others, the guest needs both hosts
/// for a while after the switchover, so an operator has to request them.
fn can() -> Vec<Strategy> {
    let all = DiskChoice::ALL.into_iter().filter_map(strategy);
    all.filter(|it| it.promise == Promise::Everything).collect()
}

fn open(
    context: &Context,
    (guest, described): (&GuestDescription, &Described),
    region: RegionId,
    (strategy, why): (Strategy, Option<Why>),
    known: &Known,
) -> Result<LocalDisk, ApiError> {
    let name = &described.name;
    let image = image_of(context, described)?;
    writable::check(&image.path).map_err(|unwritable| {
        refused(format!("disk {name}: {}", unwritable.text)).hint(unwritable.hint)
    })?;
    known.check(name)?;
    let (format, size, base) = match image.format {
        ImageFormat::Raw => (DiskFormat::Raw, raw_size(described, &image, known), None),
        ImageFormat::Qcow2 => {
            let growing = qcow2::look(name, &image.path)?;
            let unknown = Err("what it stands on in its QEMU is not known".to_owned());
            let seen = known.stands_on.get(name).unwrap_or(&unknown);
            let (says, seen) = (growing.backing.as_ref(), (seen, known.pid));
            let config = &context.parts.config;
            let base = match guest.backing(name) {
                Some(_) => {
                    let images = config.hypervisor.all_images();
                    backing_files::check(&images, guest, described, says, seen)?;
                    None
                }
                None => base_images::look(&config.state, name, says, seen)?,
            };
            (growing.format, growing.size, base)
        }
    };
    let disk = RawDisk::open(&image.path, size)
        .map_err(|error| refused(format!("disk {name}: {error}")))?;
    let content = (disk, format, base);
    let usually_written = known.usually_written.get(name).copied().unwrap_or(0.0);
    Ok(LocalDisk {
        why,
        usually_written,
        ..local_disk((described, &image), region, (content, strategy), known.pid)?
    })
}

/// Opens a read-only image that the destination lacks. It is sent once, since it cannot change.
fn open_read_only(
    context: &Context,
    (guest, described): (&GuestDescription, &Described),
    region: RegionId,
    known: &Known,
) -> Result<LocalDisk, ApiError> {
    let name = &described.name;
    let image = image_of(context, described)?;
    let format = match image.format {
        ImageFormat::Raw => DiskFormat::Raw,
        ImageFormat::Qcow2 => {
            let growing = qcow2::look(name, &image.path)?;
            backing_files::is_overlay(guest, described, growing.backing.as_ref())?;
            growing.format
        }
    };
    let disk = RawDisk::open_to_read(&image.path)
        .map_err(|error| refused(format!("disk {name}: {error}")))?;
    let content = ((disk, format, None), Strategy::PRECOPY);
    local_disk((described, &image), region, content, known.pid)
}

fn refused(text: String) -> ApiError {
    ApiError::new(ErrorCode::Refused, text)
}

/// Returns the image of a disk on this host.
fn image_of(context: &Context, described: &Described) -> Result<Image, ApiError> {
    let image = context.parts.config.hypervisor.image(&described.image);
    image.ok_or_else(|| {
        let text = format!(
            "this host does not know the image {} any more",
            described.image
        );
        refused(text).hint("name it under [images] in the agent's configuration")
    })
}

/// The file of an image, its format and its base image.
type Opened = (RawDisk, DiskFormat, Option<Base>);

/// Returns the disk of an opened image, unless QEMU uses another file.
fn local_disk(
    (described, image): (&Described, &Image),
    region: RegionId,
    ((disk, format, base), strategy): (Opened, Strategy),
    pid: i32,
) -> Result<LocalDisk, ApiError> {
    let name = &described.name;
    let looked = disk.file().metadata();
    let file = looked.map_err(|error| refused(format!("disk {name}: {error}")))?;
    let used = has_open(pid, &file);
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
        // The destination creates the image for this guest.
        starts_zero: true,
    };
    let allocated_bytes = match file.is_file() {
        true => (file.blocks() * 512).min(image_bytes),
        false => used_bytes(&disk),
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
        why: None,
        image: image.path.clone(),
        disk: Arc::new(disk),
        read_only: described.read_only,
        usually_written: 0.0,
    })
}

/// Returns the size of a raw disk: that of its file, or what its guest sees of a larger volume.
fn raw_size(described: &Described, image: &Image, known: &Known) -> ExportSize {
    match known.sizes.get(&described.name) {
        Some(bytes) if is_volume(&image.path) => ExportSize::Bytes(*bytes),
        _ => ExportSize::OfFile,
    }
}

/// Estimates the bytes of a volume that are not zero, from a sample: a volume does not report which
/// parts of it were never written. A block that cannot be read counts as content: what becomes of
/// it is the strategy's matter.
fn used_bytes(disk: &RawDisk) -> u64 {
    let blocks = blocks_of(disk.size_bytes());
    let samples = blocks.min(VOLUME_SAMPLES);
    let (mut used, mut block) = (0, [0; BLOCK_SIZE]);
    for sample in 0..samples {
        // A block of each part, at changing places: content often repeats at regular distances.
        let part = blocks / samples;
        let within = sample.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
        let range = BlockRange::new(sample * part + within % part, 1);
        let is_zero =
            read_blocks(disk, range, &mut block).is_ok() && longhaul_codec::is_zero(&block);
        used += u64::from(!is_zero);
    }
    let bytes = u128::from(disk.size_bytes()) * u128::from(used) / u128::from(samples.max(1));
    // It is not more than the size.
    bytes as u64
}

/// Returns which part of a disk a strategy leaves for the drain.
fn pulled(strategy: Strategy) -> Pulled {
    match (strategy.promise, strategy.before) {
        (Promise::Everything | Promise::Nothing, _) => Pulled::Nothing,
        (Promise::List, Before::Nothing) => Pulled::All,
        (Promise::List, _) => Pulled::Often,
    }
}

impl LocalDisk {
    /// Returns whether its image is on a volume. Which parts of it are used is an estimate then.
    pub(crate) fn is_on_volume(&self) -> bool {
        is_volume(&self.image)
    }

    /// Returns whether its image grows (qcow2).
    pub(crate) fn grows(&self) -> bool {
        matches!(self.offered.format, DiskFormat::Qcow2(_))
    }

    /// Returns the blocks that must be at the destination before the guest runs there even if
    /// others are missing: in a growing image, those that QEMU needs to open it. Call it after QEMU
    /// has closed the image.
    pub(crate) fn promised(&self) -> io::Result<Vec<BlockRange>> {
        match self.grows() && self.strategy.promise == Promise::List {
            true => qcow2::opened_with(&*self.disk),
            false => Ok(Vec::new()),
        }
    }

    /// Returns the image's current length in bytes, or an error if the image is longer than its
    /// region.
    pub(crate) fn image_bytes(&self) -> io::Result<u64> {
        let bytes = self.disk.file_bytes()?;
        match bytes <= self.offered.image_bytes {
            true => Ok(bytes),
            false => Err(io::Error::other(Outgrown)),
        }
    }

    /// Returns the image's length in bytes after QEMU has closed it.
    pub(crate) fn final_bytes(&self) -> io::Result<u64> {
        if self.grows() && self.is_on_volume() {
            self.disk.ends_at(end_bytes(&*self.disk)?);
        }
        self.image_bytes()
    }

    /// Returns the image's current number of blocks. Blocks after them are zero.
    pub(crate) fn image_blocks(&self) -> u64 {
        self.image_bytes().map_or(self.spec.blocks, blocks_of)
    }

    /// Returns the blocks that are no holes. Of an image with more than `extents_max` extents, all
    /// of the rest.
    pub(crate) fn used_blocks(&self, extents_max: usize) -> Vec<BlockRange> {
        let (size, whole) = (self.disk.size_bytes(), self.image_blocks());
        let extents = self.disk.extents(0..size, extents_max);
        let extents = extents.unwrap_or_else(|error| {
            tracing::warn!(%error, disk = self.spec.name, "cannot tell where it has holes");
            Vec::new()
        });
        let (mut used, mut at) = (Vec::new(), 0);
        for extent in extents {
            let end = at + extent.length_bytes;
            if !extent.hole {
                used.push((at / BLOCK, end.div_ceil(BLOCK).min(whole)));
            }
            at = end;
        }
        used.push((at / BLOCK, whole));
        let ranges = used.into_iter().filter(|(start, end)| end > start);
        ranges
            .map(|(start, end)| BlockRange::new(start, end - start))
            .collect()
    }

    /// Returns its strategy as the API names it.
    pub(crate) fn choice(&self) -> DiskChoice {
        let is_it = |choice: &DiskChoice| choice.name() == self.strategy.name;
        DiskChoice::ALL.into_iter().find(is_it).unwrap_or_default()
    }

    /// Returns the reason for the strategy, if the agent has chosen it.
    pub(crate) fn why(&self) -> Option<String> {
        self.why.map(|why| why.to_string())
    }

    /// Returns the disk's part of the report.
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

    /// Returns whether the destination needs the complete base image before the guest is stopped.
    pub(crate) fn awaits_base(&self) -> bool {
        self.offered.base.as_ref().is_some_and(|base| !base.lazily)
    }

    /// Returns the id of its base image.
    pub(crate) fn base(&self) -> Option<ImageId> {
        self.offered.base.as_ref().map(id_of)
    }

    /// Returns the image's length in bytes, for display.
    pub(crate) fn shown_bytes(&self) -> u64 {
        self.image_bytes().unwrap_or(self.offered.image_bytes)
    }

    /// Tells the engine of holes, which do not travel. Write reporting must be active: holes are
    /// read with the engine locked, so a later write to one is reported afterwards.
    pub(crate) fn tell_holes(&self, sending: &Sending) -> io::Result<()> {
        let size = self.disk.size_bytes();
        let mut at = 0;
        while at < size {
            let mut engine = sending.engine();
            let end = (at + HOLES_BYTES).min(size);
            for extent in self.disk.extents(at..end, HOLES_MAX)? {
                let behind = at + extent.length_bytes;
                // The disk may end within its last block.
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

/// Adds the disks to an engine.
pub(crate) fn add(engine: &mut Source, disks: &[LocalDisk]) -> Result<(), SourceError> {
    let pulled = |disk: &&LocalDisk| disk.offered.pulled != Pulled::Nothing;
    let usually_written = disks.iter().filter(pulled).map(|disk| disk.usually_written);
    engine.is_usually_written(usually_written.sum());
    disks
        .iter()
        .try_for_each(|disk| engine.add(&disk.spec, disk.strategy))
}

/// Returns whether blocks of a disk may be missing at the destination after the switchover.
pub(crate) fn may_be_left(disk: &LocalDisk) -> bool {
    disk.strategy.promise == Promise::List
}

/// Returns the path of a disk's device in QEMU, if the disk can be had. A disk whose writes are
/// tracked can: a move ends that first.
async fn movable_device(
    guest: &Guest,
    qmp: &Qmp,
    (disk, image): (&str, &Path),
) -> Result<String, FrontError> {
    let device = exports::device(guest, qmp, (disk, image)).await?;
    match disk::find(qmp, guest.pid().unwrap_or(-1), &device).await {
        Ok(_) => Ok(device),
        Err(FindError::Nodes(error)) if error.is_tracked() => Ok(device),
        Err(error) => Err(FrontError::not_found(disk, &error)),
    }
}
