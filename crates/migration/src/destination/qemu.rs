//! The QEMU of an arriving guest: launched, filled, loaded, and resumed or quit.

use crate::context::Context;
use crate::destination::arriving_memory::{LoadError, Loading, Monitor, Serving};
use crate::destination::call::ExpectError;
use crate::destination::disks::Disks;
use crate::destination::local_content::Kept;
use crate::destination::page_server::Started;
use crate::destination::receiver::Receiving;
use crate::destination::store::Store;
use crate::disks::exports::{self, Comes, Coming, FrontError};
use crate::disks::{read_blocks, volumes};
use crate::host::memory_notes::ArrivingNote;
use crate::limits::peer_quota::Admission;
use crate::limits::shared_dedup::{Look, Shown};
use crate::status::guest_rate::RateMeter;
use crate::status::usage::{Meter, Usage};
use crate::verify;
use longhaul_codec::{BlockId, BlockWrite, Content, DigestKey};
use longhaul_engine::destination::DestinationError;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::capabilities::USERFAULTFD_HINT;
use longhaul_hypervisor::disk::base::Base;
use longhaul_hypervisor::manager::{
    Commit, CommitError, Cookie, GuestManager, IncomingGuest, LaunchIncomingError, Launched, Lease,
};
use longhaul_hypervisor::memory::{AttachError, GuestMemory, Incoming, IncomingError, SourceError};
use longhaul_hypervisor::observe::observe;
use longhaul_hypervisor::qmp::{Qmp, QmpError};
use longhaul_hypervisor::vcpus::Vcpus;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::guest::Managed;
use longhaul_protocol::machine::{Difference, Machine};
use longhaul_protocol::message::{Offer, Refusal, RefusalCode, ToSource};
use longhaul_protocol::{
    BLOCK_SIZE, BlockRange, Generation, MigrationId, RegionId, RegionKind, RegionSpec,
};
use longhaul_storage::disk::RawDisk;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::task::block_in_place;

/// Why the QEMU of an arriving guest failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DestinationQemuError {
    /// QEMU was not launched.
    #[error(transparent)]
    Launch(#[from] LaunchIncomingError),
    /// The source cannot be offered a bulk connection.
    #[error(transparent)]
    Expect(#[from] ExpectError),
    /// The machine here differs from the source's.
    #[error("the machine here would not be the same: {}", differences(.0))]
    Different(Vec<Difference>),
    /// A region has no RAM block in this QEMU.
    #[error("region {name} of {blocks} blocks has no place in the machine here")]
    Region {
        /// The region's name.
        name: String,
        /// The region's length in blocks.
        blocks: u64,
    },
    /// The list of regions is invalid.
    #[error(transparent)]
    Regions(#[from] DestinationError),
    /// The memory of QEMU cannot be accessed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// QEMU did not take the stream, or could not load it.
    #[error(transparent)]
    Incoming(#[from] IncomingError),
    /// QEMU cannot run a guest before all of its memory has arrived.
    #[error("its memory cannot follow: {0}")]
    CannotFollow(SourceError),
    /// The process that serves its memory did not start.
    #[error("its memory cannot follow: no page server: {0}")]
    PageServer(io::Error),
    /// QEMU could not load the guest.
    #[error("{error}; the end of its log: {log}")]
    Load {
        /// What failed.
        error: IncomingError,
        /// The last lines of QEMU's log, which is removed with the rest of the guest.
        log: String,
    },
    /// QEMU refused a command or does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Received content cannot be read.
    #[error("cannot compare what has come: {0}")]
    Content(String),
    /// A system call failed.
    #[error("cannot keep what is known of the guest: {0}")]
    Host(#[from] io::Error),
    /// A disk export could not be put below a disk.
    #[error(transparent)]
    Front(#[from] FrontError),
    /// Messages arrived in an invalid order.
    #[error("the source breaks the protocol: {0}")]
    Order(&'static str),
    /// A task of the agent panicked.
    #[error("a part of the agent broke: {0}")]
    Broken(String),
}

fn differences(list: &[Difference]) -> String {
    let shown: Vec<String> = list.iter().take(5).map(|one| one.text.clone()).collect();
    let more = list.len().saturating_sub(shown.len());
    let more = if more == 0 {
        String::new()
    } else {
        format!("; and {more} more")
    };
    format!("{}{more}", shown.join("; "))
}

impl DestinationQemuError {
    /// Returns the refusal for the source.
    pub(crate) fn into_refusal(self, host: &str) -> Refusal {
        let code = match &self {
            Self::Different(_)
            | Self::CannotFollow(_)
            | Self::Launch(LaunchIncomingError::Unsuitable(_)) => RefusalCode::Unsuitable,
            Self::Region { .. } | Self::Regions(_) | Self::Order(_) => RefusalCode::Invalid,
            _ => RefusalCode::QemuFailed,
        };
        let hint = match &self {
            Self::Different(list) => list.first().map(|first| first.hint.clone()),
            Self::CannotFollow(_) => {
                Some(format!("{USERFAULTFD_HINT}; or choose --strategy precopy"))
            }
            _ => None,
        };
        Refusal {
            code,
            text: format!("{host}: {self}"),
            hint,
        }
    }
}

/// The index of each memory region's RAM block in QEMU.
type Places = BTreeMap<RegionId, usize>;

/// The QEMU of an arriving guest.
pub(crate) struct DestinationQemu {
    guests: Arc<dyn GuestManager>,
    guest: Guest,
    lease: Lease,
    /// The path of the socket on which QEMU takes the stream.
    socket: PathBuf,
    /// Whether QEMU was set up by its manager, and listens there already.
    listens: bool,
    /// What its manager here has for the one at the source.
    prepared: Cookie,
    /// What its manager at the source has for the one here.
    cookie: Cookie,
    machine: Machine,
    memory: GuestMemory,
    places: Places,
    incoming: Option<Incoming>,
    begun: bool,
    /// The part of its memory that may follow when it runs here.
    follows: Pulled,
    /// The page server, until QEMU loads the guest without some of its memory.
    page_server: Option<Started>,
    /// Whether it was loaded without some of its memory.
    lacks: bool,
    /// QEMU's stream up to its list of RAM blocks, if memory may follow.
    prelude: Vec<u8>,
    migration: MigrationId,
    receiving: Arc<Receiving>,
    /// Lets other guests from the same source read this guest's memory and disks, until the guest
    /// runs and writes to them.
    shown: Option<Shown>,
    key: DigestKey,
    gone: bool,
    meter: Meter,
    /// The threads that run the guest, if they are known.
    vcpus: Option<Vcpus>,
}

impl DestinationQemu {
    /// Launches QEMU for an offer, and compares its machine with the source's. A failure leaves
    /// nothing behind.
    pub(crate) async fn launch(
        context: &Context,
        (offer, follows, managed): (&Offer, Pulled, Option<Managed>),
        content: (Disks, Kept),
        bases: BTreeMap<String, Base>,
        admission: &Admission,
    ) -> Result<Self, DestinationQemuError> {
        let meter = Meter::start();
        let guests = context.parts.guests.clone();
        let config = &context.parts.config.hypervisor;
        let sizes = block_in_place(|| volumes::sizes(config, &offer.guest));
        let sizes = sizes.map_err(|error| io::Error::other(error.message))?;
        let incoming = IncomingGuest {
            description: offer.guest.clone(),
            generation: offer.generation.0,
            bases,
            sizes,
            sender: admission.sender(),
            managed,
        };
        let Launched {
            guest,
            lease,
            socket,
            listens,
            cookie: prepared,
        } = guests.launch_incoming(incoming).await?;
        let state = &context.parts.config.state;
        let serve = async {
            if follows == Pulled::Nothing {
                return Ok(None);
            }
            let can = Incoming::can_run_early(lease.qmp()).await;
            can.map_err(DestinationQemuError::CannotFollow)?;
            let started = Started::new(state, guest.name()).await;
            started.map(Some).map_err(DestinationQemuError::PageServer)
        };
        let set_up = Self::set_up(offer, &guest, lease.qmp(), content, admission);
        match tokio::try_join!(serve, set_up) {
            Ok((page_server, (machine, memory, places, receiving, shown))) => {
                if follows != Pulled::Nothing {
                    receiving.expect_lists(&offer.regions);
                }
                let vcpus = RateMeter::vcpus(lease.qmp(), guest.pid()).await;
                Ok(Self {
                    guests,
                    guest,
                    lease,
                    socket,
                    listens,
                    prepared,
                    cookie: Cookie::default(),
                    machine,
                    memory,
                    places,
                    incoming: None,
                    begun: false,
                    follows,
                    page_server,
                    lacks: false,
                    prelude: Vec::new(),
                    migration: offer.migration,
                    receiving,
                    shown: Some(shown),
                    key: DigestKey(offer.digest_key),
                    gone: false,
                    meter,
                    vcpus,
                })
            }
            Err(error) => {
                abort(&*guests, &guest, &lease).await;
                Err(error)
            }
        }
    }

    async fn set_up(
        offer: &Offer,
        guest: &Guest,
        qmp: &Qmp,
        arriving: (Disks, Kept),
        admission: &Admission,
    ) -> Result<(Machine, GuestMemory, Places, Arc<Receiving>, Shown), DestinationQemuError> {
        let machine = observe(qmp).await?;
        let different = machine.differences(&offer.machine);
        if !different.is_empty() {
            return Err(DestinationQemuError::Different(different));
        }
        let pid = guest
            .pid()
            .ok_or_else(|| io::Error::other("QEMU has no process"))?;
        let memory = GuestMemory::attach(qmp, pid).await?;
        let places = places(&memory, &offer.regions)?;
        let store = GuestStore {
            memory: memory.clone(),
            places: places.clone(),
        };
        let key = DigestKey(offer.digest_key);
        let arrived = Arrived {
            memory: store.clone(),
            disks: arriving.0.images().collect(),
        };
        let shown = admission.others().show(offer.migration, Arc::new(arrived));
        let receiving = Receiving::new(
            &offer.regions,
            Box::new(store),
            arriving,
            key,
            admission.means(),
        )?;
        Ok((machine, memory, places, receiving, shown))
    }

    /// Puts disk exports below disks of which a part may arrive while the guest runs. After an
    /// error QEMU has to be quit.
    pub(crate) async fn put_below(
        &self,
        context: &Context,
        migration: MigrationId,
        disks: &[Comes],
    ) -> Result<(), DestinationQemuError> {
        let state = &context.parts.config.state;
        let coming = Coming {
            migration,
            digest_key: self.key.0,
            pulled: Pulled::Nothing,
        };
        let put_in = exports::put_in_for(state, &self.guest, self.lease.qmp(), coming, disks);
        self.receiving.below(put_in.await?);
        Ok(())
    }

    /// Returns the message that lets the source's QEMU migrate, if another program manages the
    /// guest.
    pub(crate) fn prepared(&mut self) -> Option<ToSource> {
        let Cookie(cookie) = std::mem::take(&mut self.prepared);
        let manager = self.guest.owner().manager();
        manager.map(|_| ToSource::Prepared { cookie })
    }

    /// Keeps what the guest's manager at the source has for the one here.
    pub(crate) fn departed(&mut self, cookie: Vec<u8>) {
        self.cookie = Cookie(cookie);
    }

    /// Returns QEMU's process.
    pub(crate) fn pid(&self) -> i32 {
        self.guest.pid().unwrap_or_default()
    }

    /// Returns the machine as QEMU reports it.
    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the receiver of the source's frames.
    pub(crate) fn receiving(&self) -> &Arc<Receiving> {
        &self.receiving
    }

    /// Gives QEMU the head of the stream. A repeated call does nothing.
    pub(crate) async fn begin(&mut self, prelude: &[u8]) -> Result<(), DestinationQemuError> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        let (qmp, socket) = (self.lease.qmp(), &self.socket);
        self.incoming = Some(match self.follows {
            Pulled::Nothing if self.listens => {
                Incoming::start_at_listening(qmp, socket, prelude).await?
            }
            Pulled::Nothing => Incoming::start(qmp, socket, prelude).await?,
            Pulled::Often | Pulled::All => {
                self.prelude = prelude.to_vec();
                match self.listens {
                    true => Incoming::start_for_postcopy_at_listening(qmp, socket, prelude).await?,
                    false => Incoming::start_for_postcopy(qmp, socket, prelude).await?,
                }
            }
        });
        self.receiving.open();
        Ok(())
    }

    /// Gives QEMU the rest of the stream, and waits until QEMU has loaded it. What is missing of
    /// memory that may follow is asked for over `serving` from then on.
    pub(crate) fn load(
        &mut self,
        tail: Vec<u8>,
        state: PathBuf,
        serving: Option<Serving>,
    ) -> impl Future<Output = Result<(), DestinationQemuError>> + Send + use<> {
        let (incoming, guest) = (self.incoming.take(), self.guest.clone());
        let page_server = self.page_server.take();
        let missing = self.receiving.missing_memory();
        let note = missing.map(|regions| ArrivingNote {
            migration: self.migration,
            digest_key: self.key.0,
            pulled: self.follows,
            prelude: std::mem::take(&mut self.prelude),
            regions,
            whole: false,
            server: page_server.as_ref().map(|server| server.helper.clone()),
        });
        let lacks = |note: &ArrivingNote| note.regions.iter().any(|it| !it.missing.is_empty());
        self.lacks = note.as_ref().is_some_and(lacks);
        if self.lacks {
            // Nobody reads RAM that QEMU would have to ask for.
            self.shown = None;
        }
        let monitor = match guest.owner().manager() {
            // The program that manages it needs its monitor meanwhile.
            Some(_) => Monitor::Of(self.guests.clone(), guest.name().to_owned()),
            None => Monitor::Held(self.lease.qmp().clone()),
        };
        async move {
            let incoming = incoming.ok_or(DestinationQemuError::Order("Complete without Start"))?;
            let loaded = match (serving, note, page_server) {
                (Some(serving), Some(note), Some(server)) => {
                    let guest = Loading {
                        incoming,
                        monitor,
                        server: server.connection,
                        state: &state,
                        guest: guest.name(),
                    };
                    let loaded = serving.load(guest, &tail, note).await;
                    loaded.map_err(|error| match error {
                        LoadError::Incoming(error) => error.into(),
                        LoadError::Note(error) => error.into(),
                    })
                }
                _ => incoming.finish(&tail).await.map(drop).map_err(Into::into),
            };
            loaded.map_err(|error| match error {
                // It has said more on its standard error.
                DestinationQemuError::Incoming(
                    error @ (IncomingError::Ended
                    | IncomingError::Refused(_)
                    | IncomingError::Socket { .. }),
                ) => {
                    let log = guest.last_words();
                    DestinationQemuError::Load { error, log }
                }
                other => other,
            })
        }
    }

    /// Returns whether memory is missing that follows. To be asked after [`Self::load`].
    pub(crate) fn lacks_memory(&self) -> bool {
        self.lacks
    }

    /// Returns the part of its memory that may follow when it runs here.
    pub(crate) fn follows(&self) -> Pulled {
        self.follows
    }

    /// Returns digests of a range of a region, as QEMU's RAM or the disk's image holds it.
    pub(crate) fn digests(
        &self,
        region: RegionId,
        range: BlockRange,
        blocks_per_digest: u32,
    ) -> Result<Vec<[u8; 16]>, DestinationQemuError> {
        let not_moved = || DestinationQemuError::Order("a region that is not moved");
        if self.lacks && self.places.contains_key(&region) {
            return Err(DestinationQemuError::Order(
                "memory that follows is not compared",
            ));
        }
        let content = match self.places.get(&region) {
            Some(place) => verify::Content::Memory(Arc::new(self.memory.clone()), *place),
            None => verify::Content::Disk(self.receiving.disk(region).ok_or_else(not_moved)?),
        };
        content
            .digests(range, blocks_per_digest, self.key)
            .map_err(DestinationQemuError::Content)
    }

    /// Makes the guest this host's, and resumes it, unless it was paused.
    pub(crate) async fn commit(
        &mut self,
        generation: Generation,
        paused: bool,
    ) -> Result<(), CommitError> {
        self.shown = None;
        let commit = Commit {
            generation: generation.0,
            runs: !paused,
            follows: self.lacks,
            cookie: std::mem::take(&mut self.cookie),
        };
        let Self { guest, lease, .. } = self;
        self.guests.commit(guest, Some(lease), commit).await
    }

    /// Returns the guest and its monitor, for work beside the migration.
    pub(crate) fn guest_and_qmp(&self) -> (Guest, Qmp) {
        (self.guest.clone(), self.lease.qmp().clone())
    }

    /// Waits until QEMU has ended by itself.
    pub(crate) async fn ended(&self) {
        if self.gone {
            std::future::pending::<()>().await;
        }
        if let Err(error) = self.guest.ended().await {
            tracing::error!(guest = self.guest.name(), %error, "cannot watch QEMU");
            std::future::pending::<()>().await;
        }
    }

    /// Records that QEMU has ended by itself.
    pub(crate) fn forget_process(&mut self) {
        self.gone = true;
    }

    /// Quits QEMU and removes what was made for it.
    pub(crate) async fn quit(&mut self) {
        self.gone = true;
        self.incoming = None;
        self.end_page_server().await;
        abort(&*self.guests, &self.guest, &self.lease).await;
    }

    /// Ends the page server, if it has no QEMU yet.
    pub(crate) async fn end_page_server(&mut self) {
        if let Some(server) = self.page_server.take()
            && let Err(error) = server.end().await
        {
            let guest = self.guest.name();
            tracing::error!(guest, %error, "something of its page server is left over");
        }
    }

    /// Returns the end of QEMU's log.
    pub(crate) fn last_words(&self) -> String {
        crate::host::qemu::end_of_log(&self.guest)
    }

    /// Returns the CPU time and memory used so far.
    pub(crate) fn usage(&self) -> Usage {
        self.meter.usage(self.guest.pid())
    }

    /// Returns the threads that run the guest, if they are known.
    pub(crate) fn vcpus(&self) -> Option<&Vcpus> {
        self.vcpus.as_ref()
    }

    /// Ends the hold on QEMU's monitor, and returns what goes on to measure the agent's usage.
    pub(crate) fn into_meter(self) -> Meter {
        self.meter
    }
}

/// Ends the QEMU of a guest that does not come.
async fn abort(guests: &dyn GuestManager, guest: &Guest, lease: &Lease) {
    if let Err(error) = guests.abort_incoming(guest.name(), Some(lease)).await {
        tracing::error!(guest = guest.name(), %error, "something of this guest is left over");
    }
}

/// Returns the index of each memory region's RAM block in QEMU.
fn places(memory: &GuestMemory, regions: &[RegionSpec]) -> Result<Places, DestinationQemuError> {
    let place = |spec: &RegionSpec| {
        let place = memory.find(&spec.name);
        let place = place.filter(|place| {
            let block = &memory.blocks()[*place];
            !block.is_kept() && block.blocks() == spec.blocks
        });
        let missing = || DestinationQemuError::Region {
            name: spec.name.clone(),
            blocks: spec.blocks,
        };
        place.map(|place| (spec.id, place)).ok_or_else(missing)
    };
    let memory = regions.iter();
    let memory = memory.filter(|region| region.kind() == RegionKind::Memory);
    let places: Places = memory.map(place).collect::<Result<_, _>>()?;
    let distinct: BTreeSet<usize> = places.values().copied().collect();
    if distinct.len() < places.len() {
        return Err(DestinationQemuError::Order(
            "two regions are the same RAM block",
        ));
    }
    Ok(places)
}

/// The regions of a guest in the RAM of its QEMU.
#[derive(Clone)]
struct GuestStore {
    memory: GuestMemory,
    places: Places,
}

impl GuestStore {
    fn place(&self, region: RegionId) -> Result<usize, String> {
        let place = self.places.get(&region).copied();
        place.ok_or_else(|| format!("there is no region {}", region.0))
    }

    fn read_block(&self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> Result<(), String> {
        let range = BlockRange::new(id.block, 1);
        let read = self.memory.read(self.place(id.region)?, &[range], into);
        read.map_err(|error| error.to_string())
    }
}

/// The content of an arriving guest that other guests' frames may refer to: its memory and its
/// disks.
struct Arrived {
    memory: GuestStore,
    disks: BTreeMap<RegionId, Arc<RawDisk>>,
}

impl Look for Arrived {
    fn look(&self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> bool {
        let range = BlockRange::new(id.block, 1);
        match self.disks.get(&id.region) {
            Some(disk) => read_blocks(disk, range, into).is_ok(),
            None => self.memory.read_block(id, into).is_ok(),
        }
    }
}

impl Store for GuestStore {
    fn read(&mut self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> Result<(), String> {
        self.read_block(id, into)
    }

    fn write(&mut self, writes: &[BlockWrite<'_>], fresh: &[bool]) -> Result<(), String> {
        static ZEROS: [u8; 64 * BLOCK_SIZE] = [0; 64 * BLOCK_SIZE];
        for (write, fresh) in writes.iter().zip(fresh) {
            let place = self.place(write.region)?;
            let done = match write.content {
                Content::Zero if *fresh => Ok(()),
                Content::Zero => {
                    let mut pieces = (write.range.start..write.range.end()).step_by(64);
                    pieces.try_for_each(|start| {
                        let count = (write.range.end() - start).min(64);
                        let zeros = &ZEROS[..count as usize * BLOCK_SIZE];
                        self.memory
                            .write(place, &[BlockRange::new(start, count)], zeros)
                    })
                }
                Content::Bytes(bytes) => self.memory.write(place, &[write.range], bytes),
            };
            done.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}
