//! Versions that arrive from a source.

use super::{About, First, about, folder, note};
use crate::channel::{Receiver, Sender, TalkError};
use crate::context::Context;
use crate::disks::images::{invalid, refused};
use crate::host::lock::lock;
use crate::host::names::is_name;
use crate::host::right::Holder;
use crate::host::set_aside::set_aside_as;
use crate::limits::peer_quota;
use longhaul_parcel::{Replica, ReplicaDisk, ReplicaError, ReplicaId, ReplicaSpec, Retention};
use longhaul_protocol::Generation;
use longhaul_protocol::message::Refusal;
use longhaul_protocol::replica::{FromReplica, ReplicaOffer, ToReplica};
use longhaul_protocol::units::show_bytes;
use longhaul_storage::RightsError;
use longhaul_storage::disk::is_volume;
use longhaul_storage::files::{RealFiles, create_folder};
use longhaul_transport::TrustedHost;
use nix::sys::statvfs::statvfs;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use tokio::task::block_in_place;

/// Versions that a source can have kept here.
const KEEP_MAX: u32 = 1000;

/// Returns which versions are kept.
fn kept(offer: &ReplicaOffer) -> Retention {
    let asked = Retention {
        last: offer.keep_last,
        hourly: offer.keep_hourly,
        daily: offer.keep_daily,
        weekly: offer.keep_weekly,
    };
    asked.limited(KEEP_MAX)
}

/// Why a version is not taken.
enum Not {
    Refused(Refusal),
    /// The guest belongs to this host.
    Superseded(u64),
}

impl From<Refusal> for Not {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Not> for FromReplica {
    fn from(not: Not) -> Self {
        match not {
            Not::Refused(refusal) => Self::Refused(refusal),
            Not::Superseded(generation) => Self::Superseded { generation },
        }
    }
}

fn failed(here: &str, error: &dyn std::fmt::Display) -> Refusal {
    invalid(format!("{here} cannot keep the replica: {error}"))
}

/// Takes a version from a source, until it is complete or the channel ends.
pub(crate) async fn receive(
    (context, first): (&Context, &First),
    peer: &TrustedHost,
    (mut sender, mut receiver): (Sender<FromReplica>, Receiver<ToReplica>),
    offer: ReplicaOffer,
) -> Result<(), TalkError> {
    let here = context.parts.config.name.clone();
    let begun = block_in_place(|| begin((context, first), peer, &offer));
    let (mut replica, same) = match begun {
        Ok(begun) => begun,
        Err(not) => return sender.send(&not.into()),
    };
    let newest = replica.newest().map(|newest| newest.version);
    sender.send(&FromReplica::Begun { newest, same })?;
    let ended = loop {
        let message = match receiver.recv().await {
            Ok(message) => message,
            // What is complete is durable, and the rest comes again.
            Err(TalkError::Closed | TalkError::Channel(_)) => break Ok(()),
            Err(error) => break Err(error),
        };
        match block_in_place(|| take(&mut replica, message)) {
            Ok(None) => {}
            Ok(Some(answer)) => sender.send(&answer)?,
            Err(error) => {
                let guest = &offer.guest.name;
                tracing::warn!(guest, peer = peer.name, %error, "a version is not taken");
                break sender.send(&FromReplica::Refused(failed(&here, &error)));
            }
        }
    };
    if replica.newest().is_none() {
        lock(&first.0).insert(offer.guest.name, replica);
    }
    ended
}

fn take(replica: &mut Replica, message: ToReplica) -> Result<Option<FromReplica>, ReplicaError> {
    match message {
        ToReplica::Record { kind, rest } => replica.put(kind, &rest).map(|()| None),
        ToReplica::Mark { number, durable } => {
            if durable {
                replica.sync()?;
            }
            Ok(Some(FromReplica::Marked { number }))
        }
        ToReplica::QueryDigests { disk, first } => {
            let disk = disk as usize;
            let left = replica.known_chunks(disk)?.saturating_sub(first);
            let digests = match left {
                0 => Vec::new(),
                left => replica.digests(disk, first, left.min(4096) as usize)?,
            };
            Ok(Some(FromReplica::Digests { digests }))
        }
        ToReplica::QueryBlocks {
            disk,
            chunk,
            digests,
        } => {
            let mask = replica.differing(disk as usize, chunk, &digests)?;
            Ok(Some(FromReplica::Blocks { mask }))
        }
    }
}

/// Opens the replica of a guest, or makes it, for a version of disks of these sizes. Returns it,
/// and whether the source has brought the last version.
fn begin(
    (context, first): (&Context, &First),
    peer: &TrustedHost,
    offer: &ReplicaOffer,
) -> Result<(Replica, bool), Not> {
    let (host, from) = (peer.id, &*peer.name);
    let (guest, id) = (&offer.guest.name, ReplicaId(offer.id));
    let (here, state) = (&context.parts.config.name, &context.parts.config.state);
    let fails = |error: &dyn std::fmt::Display| failed(here, error);
    if !is_name(guest) {
        let text = format!("{guest:?} is no name that {here} can keep a replica under");
        return Err(invalid(text).into());
    }
    let known = about(state, guest).map_err(|error| fails(&error))?;
    if let Some(known) = known.as_ref().filter(|known| known.host != host) {
        let text = format!("{here} keeps a replica of {guest} for {}", known.from);
        let hint = format!("if it is not needed: on {here}: longhaul replicas remove {guest}");
        return Err(refused(text, hint).into());
    }
    peer_quota::may_use(context, peer, &offer.guest)?;
    may_follow(context, offer, known.as_ref())?;
    let path = folder(state).join(guest);
    let opened = match lock(&first.0).remove(guest) {
        Some(replica) => Some(replica),
        None => Replica::open(&path).map_err(|error| fails(&error))?,
    };
    let spec = match &opened {
        Some(replica) => {
            let disks = replica.spec().disks.iter().map(|disk| &disk.name);
            if !disks.eq(offer.disks.iter().map(|disk| &disk.image)) {
                let text = format!("{guest} has other disks than its replica on {here}");
                let hint = format!("on {here}: longhaul replicas remove {guest}");
                return Err(refused(text, hint).into());
            }
            None
        }
        None => {
            let disks = places(context, offer)?;
            has_room(here, &disks, offer)?;
            Some(ReplicaSpec {
                id,
                guest: guest.clone(),
                from: from.to_owned(),
                keep: kept(offer),
                every_s: offer.every_s,
                disks,
            })
        }
    };
    // Nothing is against it.
    create_folder(&RealFiles, &path).map_err(|error| fails(&error))?;
    let about = About {
        host,
        from: from.to_owned(),
        generation: offer.generation,
        guest: offer.guest.clone(),
        failed_over: None,
    };
    if known.as_ref() != Some(&about) {
        note(state, &about).map_err(|error| fails(&error))?;
    }
    belongs_to(context, guest, from, offer.generation).map_err(|error| fails(&error))?;
    let mut replica = match (opened, spec) {
        (Some(replica), _) => replica,
        (None, Some(spec)) => Replica::make(&path, spec).map_err(|error| fails(&error))?,
        (None, None) => return Err(fails(&"it is gone").into()),
    };
    let same = replica.spec().id == id;
    let follows = replica.follow(id, offer.every_s, kept(offer));
    follows.map_err(|error| fails(&error))?;
    let sizes: Vec<u64> = offer.disks.iter().map(|disk| disk.bytes).collect();
    let had = replica.versions().len();
    replica.begin(&sizes).map_err(|error| fails(&error))?;
    if replica.versions().len() < had {
        tracing::warn!(
            guest,
            from,
            had,
            "the images were replaced: its versions are gone"
        );
    }
    Ok((replica, same))
}

/// Notes that a guest belongs to the host that brings it, unless more is known: nobody starts it
/// here by mistake.
fn belongs_to(
    context: &Context,
    guest: &str,
    host: &str,
    generation: u64,
) -> Result<(), RightsError> {
    if context.rights.get(guest)?.is_some() {
        return Ok(());
    }
    context.rights.set(&longhaul_storage::Right {
        guest: guest.to_owned(),
        generation: Generation(generation),
        holder: longhaul_storage::Holder::Elsewhere {
            host: host.to_owned(),
        },
    })
}

/// Refuses a version of a guest that belongs to this host, or to a third one.
fn may_follow(context: &Context, offer: &ReplicaOffer, known: Option<&About>) -> Result<(), Not> {
    let (guest, here) = (&offer.guest.name, &context.parts.config.name);
    let right = context.right(guest);
    let generation = right.generation.unwrap_or_default();
    if generation > offer.generation {
        return Err(Not::Superseded(generation));
    }
    peer_quota::refuse_older(context, guest, Generation(offer.generation))?;
    if known.is_some_and(|known| known.failed_over.is_some()) {
        let text = format!("{here} is about to run {guest}, from its replica");
        let hint = format!("on {here}: longhaul failover {guest}, to end what was begun");
        return Err(refused(text, hint).into());
    }
    let found = context.parts.guests.find(guest);
    let found = found.map_err(|error| failed(here, &error))?;
    match (&right.holder, found, right.moving) {
        (Holder::Elsewhere(_), None, None) => Ok(()),
        (Holder::Here, None, None) if right.generation.is_none() => Ok(()),
        _ => {
            let text = format!("a guest {guest} is on {here}, comes, or leaves");
            let hint = format!("on {here}: longhaul guests; longhaul migrations");
            Err(refused(text, hint).into())
        }
    }
}

/// Returns where the images go.
fn places(context: &Context, offer: &ReplicaOffer) -> Result<Vec<ReplicaDisk>, Refusal> {
    let config = &context.parts.config;
    let here = &config.name;
    let each = offer.disks.iter().map(|disk| {
        let name = &disk.image;
        let Some(image) = config.hypervisor.images.get(name) else {
            let text = format!("{here} does not know the image {name}");
            return Err(refused(text, "name it under [images] in its configuration"));
        };
        if is_volume(&image.path) || image.path.starts_with("/dev") {
            let text = format!("{here} has a volume for the image {name}: a replica needs a file");
            return Err(refused(text, "give the image a path for a file there"));
        }
        if fs::symlink_metadata(&image.path).is_ok() {
            let text = format!("{here} has a file already at the path of the image {name}");
            let hint = format!("on {here}: move that file away: it may be a guest's disk");
            return Err(refused(text, hint));
        }
        Ok(ReplicaDisk {
            name: name.clone(),
            path: set_aside_as(&image.path),
        })
    });
    each.collect()
}

/// Refuses a first version that does not fit. What images of an earlier stay take counts.
fn has_room(here: &str, places: &[ReplicaDisk], offer: &ReplicaOffer) -> Result<(), Refusal> {
    let mut needed: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (place, disk) in places.iter().zip(&offer.disks) {
        let folder = place.path.parent().unwrap_or(&place.path);
        let looked = || {
            let room = statvfs(folder).map_err(io::Error::from)?;
            let free = room.blocks_available() * room.fragment_size();
            Ok::<_, io::Error>((fs::metadata(folder)?.dev(), free))
        };
        let (device, free) = looked().map_err(|error| {
            tracing::warn!(folder = %folder.display(), %error, "cannot be looked at");
            refused(
                format!("{here} has no folder for the image {}", disk.image),
                "make the folder of its path, or name it elsewhere",
            )
        })?;
        let has = fs::metadata(&place.path).map_or(0, |image| image.blocks() * 512);
        let entry = needed.entry(device).or_insert((free, 0));
        entry.1 += disk.allocated_bytes.saturating_sub(has);
    }
    match needed.into_values().find(|(free, needed)| needed > free) {
        None => Ok(()),
        Some((free, needed)) => {
            let text = format!(
                "the disks of {} take {} more on {here}, which has {} free for them",
                offer.guest.name,
                show_bytes(needed),
                show_bytes(free)
            );
            Err(refused(
                text,
                "make room there, or give the images other paths",
            ))
        }
    }
}
