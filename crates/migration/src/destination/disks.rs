//! The disks of an arriving guest, and which of their blocks are here. Their images are
//! [made](crate::disks::images) before.

use crate::destination::fetch_client::FetchClient;
use crate::disks::qcow2::blocks_with;
use crate::disks::{blocks_of, write_blocks};
use crate::host::base_image_orders::id_of;
use crate::host::base_images;
use longhaul_codec::{BlockId, BlockWrite, Content};
use longhaul_engine::destination::Destination;
use longhaul_engine::presence::{Output, Presence};
use longhaul_protocol::disk::{Base, DiskFormat, List, OfferedDisk, Pulled, Qcow2};
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, RegionId, RegionKind, RegionSpec};
use longhaul_storage::disk::qcow2::{self, HEAD_BYTES};
use longhaul_storage::disk::{Disk as _, RawDisk, Zeros};
use longhaul_storage::front::FrontFolder;
use longhaul_storage::front::arriving::masks::Masks;
use longhaul_storage::front::arriving::unwritten;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Limit on the messages of an export's server that wait for the agent.
pub(crate) const NEWS_MAX: usize = 1 << 16;

/// The disks of an arriving guest, and which of their blocks are here.
pub(crate) struct Disks {
    epoch: Epoch,
    disks: BTreeMap<RegionId, Arriving>,
    /// Whether nothing is written to the images any more: their exports have them.
    sealed: bool,
    failure: Option<String>,
}

struct Arriving {
    name: String,
    presence: Presence,
    disk: Arc<RawDisk>,
    /// Whether a part of it may arrive while the guest runs here.
    pulled: bool,
    growing: Option<Growing>,
    /// The folder of its disk export, which serves the guest until all blocks are here.
    folder: Option<FrontFolder>,
    /// The connection to its disk export, if the guest runs here: the export takes what arrives.
    puller: Option<Arc<FetchClient>>,
    /// Whether the export was given blocks that are not yet known to be on the disk.
    brought: bool,
    syncs: Syncs,
}

/// A disk of a guest that runs here, and of which a part has yet to arrive.
pub(crate) struct Fetched {
    pub(crate) name: String,
    /// Upper limit on the number of blocks that the source holds.
    pub(crate) blocks: u64,
    pub(crate) disk: Arc<RawDisk>,
    pub(crate) puller: Arc<FetchClient>,
}

/// The time that syncs of a disk take.
#[derive(Debug, Default)]
struct Syncs {
    /// When the current sync began, if one is under way.
    began: Option<Instant>,
    last: Duration,
    shortest: Option<Duration>,
}

impl Syncs {
    fn ended(&mut self) {
        let Some(began) = self.began.take() else {
            return;
        };
        self.last = began.elapsed();
        self.shortest = Some(self.shortest.map_or(self.last, |it| it.min(self.last)));
    }

    /// Estimates how long the next sync takes. If nothing waits for it, little arrives before it,
    /// and the shortest time so far counts.
    fn next(&self, something_waits: bool) -> Duration {
        match (self.began, something_waits) {
            (Some(began), _) => began.elapsed().max(self.last),
            (None, true) => self.last,
            (None, false) => self.shortest.unwrap_or_default(),
        }
    }
}

/// The source still holds a block that QEMU needs to open the image, at this byte.
#[derive(Debug, thiserror::Error)]
#[error("what its QEMU opens it with has not come, at byte {0}; try again")]
struct Lacking(u64);

/// An image that grows while it is received.
#[derive(Debug)]
struct Growing {
    /// The image as it was offered.
    image: Qcow2,
    base: Option<Base>,
    /// Whether it is an overlay of another image of the guest.
    is_overlay: bool,
    /// Its final length, once the source has sent it.
    bytes: Option<u64>,
}

impl Growing {
    /// Cuts the image at its end, durably. Returns an error unless it is the offered image and all
    /// blocks are here that QEMU needs to open it. QEMU trusts the image's header, and would open
    /// any file of this host that the header names.
    fn end(&self, disk: &RawDisk, presence: &Presence) -> Result<(), String> {
        let bytes = self.bytes.ok_or("its length is not known")?;
        let cut = disk.set_file_bytes(bytes);
        cut.map_err(|error| error.to_string())?;
        if presence.missing_blocks() > 0 {
            let here = qcow2::opened_with(disk, &mut |bytes| match blocks_with(&bytes)
                .blocks()
                .find(|block| presence.is_missing(*block))
            {
                Some(block) => Err(io::Error::other(Lacking(block * BLOCK))),
                None => Ok(()),
            });
            here.map_err(|error| error.to_string())?;
        }
        let mut head = [0; HEAD_BYTES];
        let read = disk.read(0, &mut head);
        read.map_err(|error| error.to_string())?;
        let head = qcow2::read(&head).map_err(|error| error.to_string())?;
        let same = match self.is_overlay {
            // QEMU is given the backing file, whatever its name in the header is.
            true => head.backing.is_some(),
            false => {
                let named = head.backing.as_ref().map(base_images::named).transpose();
                let named = named.map_err(|unfit| unfit.to_string())?;
                named == self.base.as_ref().map(id_of)
            }
        };
        if head.image != self.image || !same {
            return Err("its image is another one than was offered".to_owned());
        }
        Ok(())
    }
}

impl Disks {
    /// Creates the disks among these regions, which the source offers.
    pub(crate) fn new(
        regions: &[RegionSpec],
        offered: &[OfferedDisk],
        disks: &[Arc<RawDisk>],
    ) -> Self {
        let local = regions.iter();
        let local = local.filter(|region| region.kind() == RegionKind::Disk);
        let offer_of = |region: &RegionSpec| {
            let mut offered = offered.iter();
            offered.find(|disk| disk.region == region.id)
        };
        let arriving = |region: &RegionSpec, disk: &Arc<RawDisk>| Arriving {
            name: region.name.clone(),
            presence: Presence::new(region.id, region.blocks),
            disk: disk.clone(),
            pulled: offer_of(region).is_some_and(|disk| disk.pulled != Pulled::Nothing),
            growing: offer_of(region).and_then(|disk| match disk.format {
                DiskFormat::Qcow2(image) => Some(Growing {
                    image,
                    base: disk.base.clone(),
                    is_overlay: false,
                    bytes: None,
                }),
                DiskFormat::Raw => None,
            }),
            folder: None,
            puller: None,
            brought: false,
            syncs: Syncs::default(),
        };
        let disks = local.zip(disks);
        let disks = disks.map(|(region, disk)| (region.id, arriving(region, disk)));
        Self {
            epoch: Epoch(1),
            disks: disks.collect(),
            sealed: false,
            failure: None,
        }
    }

    /// Marks the disks that are overlays of other images of the guest.
    pub(crate) fn of_guest(mut self, guest: &GuestDescription) -> Self {
        for disk in self.disks.values_mut() {
            let is_overlay = guest.backing(&disk.name).is_some();
            if let Some(growing) = &mut disk.growing {
                growing.is_overlay = is_overlay;
            }
        }
        self
    }

    /// Creates the disks of a guest that runs here. Their exports take what arrives.
    pub(crate) fn pulled(disks: BTreeMap<RegionId, Fetched>) -> Self {
        let arriving = |region: RegionId, fetched: Fetched| Arriving {
            name: fetched.name,
            presence: Presence::new(region, fetched.blocks),
            disk: fetched.disk,
            pulled: true,
            growing: None,
            folder: None,
            puller: Some(fetched.puller),
            brought: false,
            syncs: Syncs::default(),
        };
        let disks = disks.into_iter();
        let disks = disks.map(|(region, fetched)| (region, arriving(region, fetched)));
        Self {
            epoch: Epoch(1),
            disks: disks.collect(),
            sealed: false,
            failure: None,
        }
    }

    /// Sets the folders of the disk exports below disks of which a part may arrive later.
    pub(crate) fn below(&mut self, folders: Vec<FrontFolder>) {
        let pulled = self.disks.values_mut().filter(|disk| disk.pulled);
        for (disk, folder) in pulled.zip(folders) {
            disk.folder = Some(folder);
        }
    }

    /// Hands the lists of missing blocks to the disk exports, durably, and whether blocks that the
    /// guest does not write are to be compared. All other blocks are here.
    pub(crate) fn hand_on(&self, verify: bool) -> Result<(), String> {
        for disk in self.disks.values() {
            let Some(folder) = &disk.folder else { continue };
            let failed = |error: &dyn std::fmt::Display| format!("disk {}: {error}", disk.name);
            let (missing, _) = disk.presence.lacks(0, usize::MAX);
            let masks = Masks {
                region: disk.presence.region(),
                blocks: blocks_of(disk.disk.size_bytes()),
                boot: Default::default(),
                missing,
            };
            if verify {
                let begun = unwritten::begin(folder, masks.region, masks.blocks);
                begun.map_err(|error| failed(&error))?;
            }
            let at = folder.stored_masks();
            masks.write(&at).map_err(|error| failed(&error))?;
            let (news, _heard) = tokio::sync::mpsc::channel(NEWS_MAX);
            let listed = FetchClient::connect(folder, (masks.region, 0), news)
                .and_then(|puller| puller.listed());
            listed.map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    fn of(&mut self, region: RegionId) -> Option<&mut Arriving> {
        self.disks.get_mut(&region)
    }

    /// Returns the image of a region that is one of these disks.
    pub(crate) fn image(&self, region: RegionId) -> Option<Arc<RawDisk>> {
        let arriving = self.disks.get(&region)?;
        Some(arriving.disk.clone())
    }

    /// Returns the images of all disks, by region.
    pub(crate) fn images(&self) -> impl Iterator<Item = (RegionId, Arc<RawDisk>)> {
        let disks = self.disks.iter();
        disks.map(|(region, arriving)| (*region, arriving.disk.clone()))
    }

    /// Returns whether a region is one of these disks.
    pub(crate) fn has(&self, region: RegionId) -> bool {
        self.disks.contains_key(&region)
    }

    pub(crate) fn connected(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        for disk in self.disks.values_mut() {
            disk.presence.connected(epoch);
        }
    }

    /// Returns whether a block of a frame may be written. Always true for a region that is no disk.
    pub(crate) fn accepts(&self, epoch: Epoch, id: BlockId, seq: u64) -> bool {
        match self.disks.get(&id.region) {
            // The export decides.
            Some(disk) if disk.puller.is_some() => epoch == self.epoch,
            Some(_) if self.sealed => false,
            Some(disk) => disk.presence.accepts(epoch, id.block, seq),
            None => true,
        }
    }

    /// Writes accepted blocks to the image, or gives them to the disk's export.
    pub(crate) fn write(&mut self, write: &BlockWrite<'_>, seq: u64) -> Result<(), String> {
        let Some(arriving) = self.of(write.region) else {
            return Err(format!("there is no region {}", write.region.0));
        };
        let range = write.range;
        if let Some(puller) = &arriving.puller {
            arriving.brought = true;
            let content = match write.content {
                Content::Zero => None,
                Content::Bytes(bytes) => Some(bytes),
            };
            let brought = puller.bring(range, content);
            return brought.map_err(|error| format!("disk {}: {error}", arriving.name));
        }
        let (disk, size) = (&arriving.disk, arriving.disk.size_bytes());
        let done = match write.content {
            Content::Zero => {
                let bytes = (range.start * BLOCK).min(size)..(range.end() * BLOCK).min(size);
                disk.zero(bytes, Zeros::MayBeHole)
            }
            Content::Bytes(bytes) => write_blocks(disk, range, bytes),
        };
        done.map_err(|error| format!("disk {}: {error}", arriving.name))?;
        // The changed masks are not recorded before the guest runs here.
        arriving.presence.arrived(range, seq);
        Ok(())
    }

    /// Waits until everything that the exports were given is on the disks.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        for disk in self.disks.values_mut() {
            if let Some(puller) = &disk.puller
                && std::mem::take(&mut disk.brought)
            {
                let settled = puller.settle();
                settled.map_err(|error| format!("disk {}: {error}", disk.name))?;
            }
        }
        Ok(())
    }

    /// Reads one block.
    pub(crate) fn read(&mut self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> Result<(), String> {
        let Some(arriving) = self.of(id.region) else {
            return Err(format!("there is no region {}", id.region.0));
        };
        crate::disks::read_blocks(&arriving.disk, BlockRange::new(id.block, 1), into)
    }

    /// Records blocks that could not be used.
    pub(crate) fn rejected(&mut self, rejected: &[(RegionId, BlockRange)], seq: u64) {
        for (region, range) in rejected {
            if let Some(arriving) = self.of(*region) {
                arriving.presence.rejected(*range, seq);
            }
        }
    }

    /// Takes a part of the source's list of a disk's blocks that it has not sent.
    pub(crate) fn listed(
        &mut self,
        list: &List,
        destination: &mut Destination,
    ) -> Result<(), String> {
        let Some(arriving) = self.of(list.region) else {
            return Err(format!("region {} is no disk", list.region.0));
        };
        if !list.remaining.is_empty() && !arriving.pulled {
            return Err("something is left of a disk that was to come as a whole".to_owned());
        }
        arriving
            .presence
            .listed(list)
            .map_err(|error| error.to_string())?;
        let is_listed = list.from_seq != u64::MAX;
        if list.next_chunk.is_none() && is_listed {
            for block in destination.listed(list.region) {
                let range = BlockRange::new(block, 1);
                arriving.presence.rejected(range, 0);
            }
        }
        Ok(())
    }

    /// Takes the length of an image that grows from the source.
    pub(crate) fn has_length(&mut self, region: RegionId, bytes: u64) -> Result<(), String> {
        let Some(arriving) = self.of(region) else {
            return Err(format!("region {} is no disk", region.0));
        };
        let longest = arriving.disk.size_bytes();
        match &mut arriving.growing {
            Some(growing) if bytes <= longest => {
                growing.bytes = Some(bytes);
                Ok(())
            }
            Some(_) => Err(format!("an image of {bytes} bytes is too long")),
            None => Err("the length of an image that does not grow".to_owned()),
        }
    }

    pub(crate) fn is_listed(&self) -> bool {
        let has_length =
            |disk: &Arriving| disk.growing.as_ref().is_none_or(|it| it.bytes.is_some());
        let mut disks = self.disks.values();
        disks.all(|disk| disk.presence.is_listed() && has_length(disk))
    }

    /// Ends writing, and makes everything durable.
    pub(crate) fn seal(&mut self) {
        self.sealed = true;
        for disk in self.disks.values_mut() {
            if let Some(growing) = &disk.growing
                && let Err(why) = growing.end(&disk.disk, &disk.presence)
            {
                let text = format!("disk {}: {why}", disk.name);
                self.failure.get_or_insert(text);
            }
            disk.presence.seal();
            disk.presence.settle();
        }
    }

    /// Makes received content durable once there is enough of it or it is old enough.
    pub(crate) fn tick(&mut self, now: Duration) {
        self.disks
            .values_mut()
            .for_each(|disk| disk.presence.tick(now));
    }

    /// Returns the next disk to sync.
    pub(crate) fn poll_sync(&mut self) -> Option<(RegionId, Arc<RawDisk>)> {
        for (region, disk) in &mut self.disks {
            while let Some(output) = disk.presence.poll() {
                match output {
                    Output::SyncData => {
                        disk.syncs.began = Some(Instant::now());
                        return Some((*region, disk.disk.clone()));
                    }
                    // `hand_on` stores the masks, once everything has arrived that comes before the
                    // guest runs.
                    Output::StoreMasks(_) => disk.presence.masks_stored(true),
                    Output::Go(..)
                    | Output::Want(_)
                    | Output::Superseded(_)
                    | Output::Flushed(_)
                    | Output::FlushFailed(_)
                    | Output::Unreadable(_) => {}
                }
            }
        }
        None
    }

    /// Takes the result of a sync.
    pub(crate) fn synced(&mut self, region: RegionId, done: io::Result<()>) {
        let Some(disk) = self.disks.get_mut(&region) else {
            return;
        };
        disk.syncs.ended();
        disk.presence.data_synced(done.is_ok());
        if let Err(error) = done {
            let text = format!("disk {} cannot be made durable: {error}", disk.name);
            self.failure.get_or_insert(text);
        }
    }

    /// Returns the estimated time of the next sync, of the slowest disk.
    pub(crate) fn sync_time(&self) -> Duration {
        let of_disk = |disk: &Arriving| disk.syncs.next(!disk.presence.is_durable());
        self.disks.values().map(of_disk).max().unwrap_or_default()
    }

    /// Returns whether everything that was received is durable; an error if it cannot be made
    /// durable.
    pub(crate) fn is_settled(&self) -> Result<bool, String> {
        match &self.failure {
            Some(why) => Err(why.clone()),
            None => Ok(self.disks.values().all(|disk| disk.presence.is_settled())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_engine::chunk::CHUNK_BLOCKS;
    use longhaul_engine::remaining::Remaining;
    use longhaul_storage::disk::ExportSize;
    use std::fs::{self, File};
    use tempfile::TempDir;

    const REGION: RegionId = RegionId(2);
    const IMAGE: Qcow2 = Qcow2 {
        version: 3,
        cluster_bits: 16,
        extended_l2: false,
        disk_bytes: 8 << 20,
    };

    /// Returns a disk that has arrived except for its length.
    fn arriving(header: &[u8]) -> (TempDir, Disks) {
        lacking(header, &List::nothing(REGION))
    }

    /// Returns a disk with this list of blocks that are still at the source.
    fn lacking(header: &[u8], list: &List) -> (TempDir, Disks) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fs::write(&path, header).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let disk = RawDisk::open(&path, ExportSize::Bytes(1 << 20)).unwrap();
        let mut arriving = Arriving {
            name: "vda".to_owned(),
            presence: Presence::new(REGION, 256),
            disk: Arc::new(disk),
            pulled: false,
            growing: Some(Growing {
                image: IMAGE,
                base: None,
                is_overlay: false,
                bytes: None,
            }),
            folder: None,
            puller: None,
            brought: false,
            syncs: Syncs::default(),
        };
        arriving.presence.listed(list).unwrap();
        let disks = Disks {
            epoch: Epoch(1),
            disks: BTreeMap::from([(REGION, arriving)]),
            sealed: false,
            failure: None,
        };
        (folder, disks)
    }

    fn sealed(disks: &mut Disks) -> Result<bool, String> {
        disks.seal();
        while let Some((region, disk)) = disks.poll_sync() {
            disks.synced(region, disk.flush());
        }
        disks.is_settled()
    }

    #[test]
    fn an_image_that_grew_is_as_long_as_the_source_says() {
        let (folder, mut disks) = arriving(&qcow2::header_alone(&IMAGE).unwrap());
        assert!(!disks.is_listed(), "its length is not known");
        disks.has_length(RegionId(1), 5).unwrap_err();
        disks.has_length(REGION, (1 << 20) + 1).unwrap_err();
        disks.has_length(REGION, 300_007).unwrap();
        assert!(disks.is_listed());
        assert_eq!(sealed(&mut disks), Ok(true));
        let image = fs::metadata(folder.path().join("image")).unwrap();
        assert_eq!(image.len(), 300_007);
        disks.disks.get_mut(&REGION).unwrap().growing = None;
        disks.has_length(REGION, 300_007).unwrap_err();
    }

    #[test]
    fn an_image_is_not_given_to_qemu_before_all_is_there_that_it_is_opened_with() {
        let header = qcow2::header_alone(&IMAGE).unwrap();
        // The header, the refcounts and the first table; then a block that QEMU does not need.
        for (block, fits) in [(0, false), (16, false), (32, false), (64, true)] {
            let left = Remaining {
                chunk: (block / CHUNK_BLOCKS) as u32,
                chunks: 1,
                mask: 1 << (block % CHUNK_BLOCKS),
                written_blocks: 1,
            };
            let list = List {
                from_seq: 1,
                remaining: vec![left],
                ..List::nothing(REGION)
            };
            let (_folder, mut disks) = lacking(&header, &list);
            disks.has_length(REGION, 1 << 20).unwrap();
            match sealed(&mut disks) {
                Ok(settled) => assert!(fits && settled, "{block}"),
                Err(why) => assert!(!fits && why.contains("has not come"), "{block}: {why}"),
            }
        }
    }

    #[test]
    fn an_image_that_is_not_what_was_offered_is_not_given_to_qemu() {
        let header = qcow2::header_alone(&IMAGE).unwrap();
        // A backing file, an external data file, another size, no image.
        for (at, byte, why) in [
            (15, 0x80, "backing file"),
            (79, 4, "a second file"),
            (27, 1, "another one than was offered"),
            (0, 0, "not in qcow2"),
        ] {
            let mut header = header.clone();
            header[at] = byte;
            let (_folder, mut disks) = arriving(&header);
            disks.has_length(REGION, 300_007).unwrap();
            let refusal = sealed(&mut disks).unwrap_err();
            assert!(refusal.contains(why), "{refusal}");
        }
        let (_folder, mut disks) = arriving(&header);
        disks.has_length(REGION, 20).unwrap();
        sealed(&mut disks).unwrap_err();
    }

    #[test]
    fn an_image_stands_on_the_base_image_that_was_offered_or_is_not_given_to_qemu() {
        let base = |byte: u8| Base {
            image: [byte; 32],
            bytes: 1 << 20,
            lazily: false,
            hot: Vec::new(),
        };
        // An overlay of the base image names it by a path of its own host.
        let named = |byte: u8| format!("/of/the/source/{}.raw", id_of(&base(byte)));
        let standing = |name: &str| {
            let mut head = qcow2::header_alone(&IMAGE).unwrap();
            head.extend([0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 3]);
            head.extend(b"raw\0\0\0\0\0");
            head.extend([0; 8]);
            let (at, length) = (head.len() as u64, name.len() as u32);
            head[8..16].copy_from_slice(&at.to_be_bytes());
            head[16..20].copy_from_slice(&length.to_be_bytes());
            head.extend(name.as_bytes());
            head
        };
        let plain = qcow2::header_alone(&IMAGE).unwrap();
        for (head, offered, fits) in [
            (standing(&named(1)), Some(base(1)), true),
            (standing(&named(2)), Some(base(1)), false),
            (standing("/etc/shadow"), Some(base(1)), false),
            (standing("/etc/shadow"), None, false),
            (standing(&named(1)), None, false),
            (plain.clone(), Some(base(1)), false),
        ] {
            let (_folder, mut disks) = arriving(&head);
            if let Some(growing) = &mut disks.disks.get_mut(&REGION).unwrap().growing {
                growing.base.clone_from(&offered);
            }
            disks.has_length(REGION, 300_007).unwrap();
            assert_eq!(sealed(&mut disks).is_ok(), fits, "{offered:?}");
        }
        // An overlay of another image of the guest names any file, which nobody opens.
        for (head, fits) in [(standing("/of/the/source.qcow2"), true), (plain, false)] {
            let (_folder, mut disks) = arriving(&head);
            if let Some(growing) = &mut disks.disks.get_mut(&REGION).unwrap().growing {
                growing.is_overlay = true;
            }
            disks.has_length(REGION, 300_007).unwrap();
            assert_eq!(sealed(&mut disks).is_ok(), fits);
        }
    }
}
