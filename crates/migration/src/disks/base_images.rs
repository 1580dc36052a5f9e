//! Base images below disks that move. The source names base images by their ids and lists the parts
//! in use. It sends only what its guest wrote. The destination reads base images from its own
//! repository. An image is complete before the guest is stopped, unless it is configured to arrive
//! while the guest runs ([`crate::disks::lazy_base_images`]).

use crate::context::Context;
use crate::disks::exports::FrontError;
use crate::disks::images::{self, Place, refused};
use crate::disks::lazy_base_images;
use crate::host::base_image_orders::id_of;
use crate::host::base_images;
use crate::host::config::Config;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::base::Base as Below;
use longhaul_hypervisor::disk::{self, Backing};
use longhaul_hypervisor::qmp::Qmp;
use longhaul_image::store::Place as Repositories;
use longhaul_image::{Bases, BringError, Bringing, ImageId, Order, Repository};
use longhaul_protocol::disk::{Base, Hot, OfferedDisk, STRIPE_BYTES, STRIPE_PAGES};
use longhaul_protocol::limits::HOT_STRIPES_MAX;
use longhaul_protocol::message::Refusal;
use longhaul_protocol::units::show_bytes;
use longhaul_storage::disk::qcow2;
use longhaul_storage::front::FrontFolder;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::{JoinHandle, spawn_blocking};

/// Time limit for a repository to answer while a base image arrives.
const PATIENCE: Duration = Duration::from_secs(60);

// A stripe that is named as hot is fetched as a whole.
const _: () = assert!(STRIPE_BYTES == longhaul_image::STRIPE_BYTES);

/// The backing files of a disk in a guest's QEMU, from the top down, or why they are unknown.
pub(crate) type Seen = Result<Vec<Backing>, String>;

/// Asks a guest's QEMU for the backing files of a disk, by the path of the disk's device.
pub(crate) async fn ask(qmp: &Qmp, device: &str) -> Seen {
    let backing = disk::backing(qmp, device).await;
    backing.map_err(|error| error.to_string())
}

/// Returns the base image of a disk on this host. The image's header and QEMU must agree on it.
pub(crate) fn look(
    state: &Path,
    name: &str,
    says: Option<&qcow2::Backing>,
    (seen, pid): (&Seen, i32),
) -> Result<Option<Base>, ApiError> {
    let refused = |why: String| {
        let text = format!("disk {name}: {why}");
        ApiError::new(ErrorCode::Refused, text)
    };
    let other = |has: String| {
        refused(format!("{has}: what it reads there cannot be told")).hint(
            "restart its QEMU with what the image says, or rebase the image with its \
             guest \
             shut down",
        )
    };
    let seen = seen.as_ref().map_err(|why| refused(why.clone()))?;
    let (says, seen) = match (says, seen.as_slice()) {
        (None, []) => return Ok(None),
        (Some(says), [seen, ..]) => (says, seen),
        (None, [_, ..]) => {
            let has = "its QEMU has it stand on another image, of which its own says nothing";
            return Err(other(has.to_owned()));
        }
        (Some(says), []) => {
            let has = format!(
                "its image stands on {:?}, and in its QEMU on nothing",
                says.name
            );
            return Err(other(has));
        }
    };
    let id =
        base_images::named(says).map_err(|unfit| refused(unfit.to_string()).hint(unfit.hint()))?;
    let bases = base_images::of_host(state);
    let failed = |error: std::io::Error| refused(error.to_string());
    let bytes = bases.whole(id).map_err(failed)?;
    let bytes = bytes.ok_or_else(|| base_images::not_here(name, id))?;
    if !seen.is(&bases.path(id), pid).map_err(failed)? {
        let short = id.short();
        let on = seen.file.as_deref().unwrap_or(&seen.driver);
        let has = format!("its image stands on base image {short}, and in its QEMU on {on:?}");
        return Err(other(has));
    }
    let image = id.0.0;
    Ok(Some(Base {
        image,
        bytes,
        lazily: false,
        hot: Vec::new(),
    }))
}

/// Adds to each base image of the disks the stripes that this host's guests use.
pub(crate) fn say_what_is_hot(state: &Path, disks: &mut [OfferedDisk]) {
    let bases = base_images::of_host(state);
    let on_bases = disks.iter_mut().filter_map(|disk| disk.base.as_mut());
    let mut on_bases: Vec<&mut Base> = on_bases.collect();
    let each = HOT_STRIPES_MAX / on_bases.len().max(1);
    for base in &mut on_bases {
        match bases.hot(id_of(base)) {
            Ok(hot) => base.hot = hottest(hot, each),
            // Then the image only arrives in another order.
            Err(error) => tracing::warn!(%error, "cannot tell what of a base image is used"),
        }
    }
}

/// Returns at most `count_max` of the most used stripes, in descending order of use.
fn hottest(mut hot: Vec<(u32, u32)>, count_max: usize) -> Vec<Hot> {
    hot.sort_by_key(|(stripe, pages)| (std::cmp::Reverse(*pages), *stripe));
    hot.truncate(count_max);
    let hot = hot.into_iter().map(|(stripe, pages)| Hot {
        stripe,
        pages: pages.min(STRIPE_PAGES.into()) as u8,
    });
    hot.collect()
}

/// The base images that arrive for a guest. Those that the guest waits for stop arriving when this
/// is dropped.
pub(crate) struct ComingBases {
    /// Images that are complete before the guest is stopped.
    coming: Vec<(Arc<Bringing>, Arc<Order>)>,
    /// Images that arrive while the guest runs.
    behind: Vec<(Arc<Bringing>, Arc<Order>)>,
    /// The bytes read for the latter that this guest counts.
    counted: AtomicU64,
    task: Option<JoinHandle<Result<(), Lacking>>>,
    /// Whether an image is unavailable.
    lacking: bool,
}

/// An unavailable base image.
struct Lacking(ImageId);

/// Returns the hint for the source's operator. The reason is in this host's log.
fn hint(here: &str, id: ImageId) -> String {
    format!("on {here}: longhaul image fetch {} says why", id.short())
}

impl ComingBases {
    /// Looks up the base images of disks, and prepares to fetch the missing ones. After this their
    /// files exist, so that QEMU can open them.
    pub(crate) fn begin(context: &Context, places: &[Place]) -> Result<Self, Refusal> {
        let config = &context.parts.config;
        let here = &config.name;
        let bases = base_images::of_host(&config.state);
        let mut coming: Vec<(Arc<Bringing>, Arc<Order>)> = Vec::new();
        let mut behind: Vec<(Arc<Bringing>, Arc<Order>)> = Vec::new();
        for place in places {
            let Some(base) = &place.offered.base else {
                continue;
            };
            let (name, id) = (&place.offered.name, id_of(base));
            if coming.iter().chain(&behind).any(|(one, _)| one.id() == id) {
                continue;
            }
            let lacks = |error: &dyn std::fmt::Display| {
                tracing::warn!(image = %id, %error, "a base image cannot be had");
                no_base(here, name, id)
            };
            let bytes = match bases.whole(id).map_err(|error| lacks(&error))? {
                Some(bytes) => bytes,
                None => {
                    let bringing = bring(&config.repository, &bases, id);
                    let bringing = bringing.map_err(|error| lacks(&error))?;
                    let bytes = bringing.size_bytes();
                    let one = (Arc::new(bringing), context.orders.with(base));
                    let lazily =
                        base.lazily && lazy_base_images::has_room(&config.state, id, places.len());
                    match lazily {
                        true => behind.push(one),
                        false => coming.push(one),
                    }
                    bytes
                }
            };
            if bytes != base.bytes {
                return Err(other_size(here, name, id));
            }
        }
        let all = coming.iter().chain(&behind);
        enough_room(config, all.map(|(one, _)| (one.id(), one.content_bytes())))?;
        Ok(Self {
            coming,
            behind,
            counted: AtomicU64::new(0),
            task: None,
            lacking: false,
        })
    }

    /// Returns the base of each disk for its QEMU. From here on, images that arrive while the guest
    /// runs are served and fetched.
    pub(crate) async fn below(
        &self,
        context: &Arc<Context>,
        guest: &str,
        places: &[Place],
    ) -> Result<BTreeMap<String, Below>, FrontError> {
        let mut below = BTreeMap::new();
        for place in places {
            let Some(base) = &place.offered.base else {
                continue;
            };
            let (name, id) = (&place.offered.name, id_of(base));
            let behind = self.behind.iter().find(|(one, _)| one.id() == id);
            let found = match behind {
                Some((_, order)) => context.show_coming((guest, name), id, order).await?,
                None => Below::File(path_of(context, base)),
            };
            below.insert(name.clone(), found);
        }
        Ok(below)
    }

    /// Starts to fetch the images that the guest waits for, in the background.
    pub(crate) fn go_on(&mut self) {
        let coming = self.coming.clone();
        if coming.is_empty() || self.task.is_some() {
            return;
        }
        self.task = Some(spawn_blocking(move || {
            for (one, order) in coming {
                let hot = order.hottest().len();
                tracing::info!(image = %one.id(), hot, "a base image comes, first what is hot of \
                    it");
                one.finish(&order).map_err(|error| {
                    tracing::error!(%error, "a base image does not come");
                    Lacking(one.id())
                })?;
            }
            Ok(())
        }));
    }

    /// Returns whether all images that the guest waits for are here. Only valid once
    /// [`Self::go_on`] was called.
    pub(crate) fn are_here(&self) -> bool {
        self.task.is_none() && !self.lacking
    }

    /// Waits until all images that the guest waits for are here, or one is unavailable.
    pub(crate) async fn brought(&mut self, here: &str) -> Result<(), String> {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let brought = task.await;
        self.task = None;
        self.lacking = !matches!(brought, Ok(Ok(())));
        match brought {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Lacking(id))) => {
                let short = id.short();
                Err(format!(
                    "base image {short} does not come: {}",
                    hint(here, id)
                ))
            }
            Err(error) => Err(format!("a part of the agent broke: {error}")),
        }
    }

    /// Returns the bytes read from the repository for these images so far. Guests that arrive
    /// together count each byte once.
    pub(crate) fn read_bytes(&self, context: &Context) -> u64 {
        let state = &context.parts.config.state;
        let behind = self.behind.iter();
        let more: u64 = behind
            .map(|(one, _)| {
                let folder = lazy_base_images::folder_of(state, one.id());
                context.coming.count(&FrontFolder::open(&folder), one.id())
            })
            .sum();
        let before = self.counted.fetch_add(more, Ordering::AcqRel);
        let own = self.coming.iter().chain(&self.behind);
        own.map(|(one, _)| one.read_bytes()).sum::<u64>() + before + more
    }
}

impl Drop for ComingBases {
    fn drop(&mut self) {
        self.coming.iter().for_each(|(one, _)| one.end());
    }
}

/// Returns the refusals of disks whose base images this host neither has nor finds in its
/// repository, or has no room for. Reads at most their manifests.
pub(crate) fn lacking(context: &Context, disks: &[OfferedDisk]) -> Vec<Refusal> {
    let config = &context.parts.config;
    let here = &config.name;
    let bases = base_images::of_host(&config.state);
    let (mut refusals, mut coming) = (Vec::new(), BTreeMap::new());
    for disk in disks {
        let Some(base) = &disk.base else { continue };
        let id = id_of(base);
        let found = match bases.whole(id) {
            Ok(Some(bytes)) => Ok((bytes, 0)),
            Ok(None) => open(&config.repository).and_then(|repository| {
                let manifest = repository.manifest(id);
                let manifest = manifest.map_err(|error| error.to_string())?;
                Ok((manifest.size_bytes(), manifest.stored_bytes()))
            }),
            Err(error) => Err(error.to_string()),
        };
        match found {
            Ok((bytes, _)) if bytes != base.bytes => {
                refusals.push(other_size(here, &disk.name, id));
            }
            Ok((_, content)) => drop(coming.insert(id, content)),
            Err(error) => {
                tracing::warn!(image = %id, error, "a base image cannot be had");
                refusals.push(no_base(here, &disk.name, id));
            }
        }
    }
    let coming = coming.into_iter().filter(|(_, content)| *content > 0);
    refusals.extend(enough_room(config, coming).err());
    refusals
}

/// Checks that the state folder has room for the content of base images that come.
fn enough_room(
    config: &Config,
    coming: impl Iterator<Item = (ImageId, u64)>,
) -> Result<(), Refusal> {
    let bases = base_images::of_host(&config.state);
    let (mut folder, mut needed) = (None, 0);
    for (id, content) in coming {
        let path = bases.path(id);
        // A part of the file may be here from an earlier fetch.
        let file = std::fs::metadata(&path);
        let here = file.map_or(0, |file| file.blocks() * 512);
        needed += content.saturating_sub(here);
        folder = path.parent().map(Path::to_owned);
    }
    let Some(folder) = folder else {
        return Ok(());
    };
    // The folder is made for the first image.
    match images::free_bytes(&folder).or_else(|| images::free_bytes(&config.state)) {
        Some(free) if images::is_too_little(free, needed) => {
            let text = format!(
                "{} has {} free for base images, and the guest's take {}",
                config.name,
                show_bytes(free),
                show_bytes(needed)
            );
            Err(refused(text, "make room in the state folder there"))
        }
        _ => Ok(()),
    }
}

fn other_size(here: &str, disk: &str, id: ImageId) -> Refusal {
    let short = id.short();
    images::invalid(format!(
        "{here} knows base image {short} of disk {disk} in another size"
    ))
}

fn no_base(here: &str, disk: &str, id: ImageId) -> Refusal {
    let short = id.short();
    let text = format!("{here} cannot have the base image {short} of disk {disk}");
    refused(text, hint(here, id))
}

fn open(from: &Repositories) -> Result<Repository, String> {
    let store = from.store().map_err(|error| error.to_string())?;
    Repository::open(store).map_err(|error| error.to_string())
}

/// Starts to fetch a base image from a repository.
fn bring(from: &Repositories, bases: &Bases, id: ImageId) -> Result<Bringing, String> {
    let repository = open(from)?;
    let bringing = bases.bring(repository, id, PATIENCE);
    bringing.map_err(|error: BringError| error.to_string())
}

/// Returns the path of a disk's base image on this host.
pub(crate) fn path_of(context: &Context, base: &Base) -> PathBuf {
    base_images::of_host(&context.parts.config.state).path(id_of(base))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::base_image_orders::Orders;
    use longhaul_image::Digest;
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_used_most_is_said_first_and_guests_that_come_together_are_heard_together() {
        let hot = hottest(vec![(1, 3), (2, 64), (3, 64), (4, 1)], 3);
        let pairs: Vec<(u32, u8)> = hot.iter().map(|hot| (hot.stripe, hot.pages)).collect();
        assert_eq!(pairs, [(2, 64), (3, 64), (1, 3)]);
        let base = |image: u8, hot: &[(u32, u8)]| Base {
            image: [image; 32],
            bytes: 1 << 30,
            lazily: false,
            hot: hot
                .iter()
                .map(|(stripe, pages)| Hot {
                    stripe: *stripe,
                    pages: *pages,
                })
                .collect(),
        };
        let orders = Orders::default();
        let one = orders.with(&base(1, &[(9, 64), (4, 2)]));
        let elsewhere = orders.with(&base(2, &[(5, 1)]));
        let other = orders.with(&base(1, &[(4, 2), (7, 64)]));
        assert!(Arc::ptr_eq(&one, &other));
        assert_eq!(one.hottest(), [4, 7, 9]);
        assert_eq!(elsewhere.hottest(), [5]);
        drop((one, other));
        assert_eq!(orders.with(&base(1, &[(3, 1)])).hottest(), [3]);
    }

    #[test]
    fn only_a_base_image_of_this_host_that_its_qemu_reads_is_named() {
        let state = tempfile::tempdir().unwrap();
        let id = ImageId(Digest([7; 32]));
        let path = base_images::of_host(state.path()).path(id);
        fs::create_dir(path.parent().unwrap()).unwrap();
        fs::write(&path, "base").unwrap();
        let read = File::open(&path).unwrap();
        let says = |name: String| qcow2::Backing {
            name,
            format: Some("raw".to_owned()),
        };
        let says_so = says(format!("/elsewhere/{id}.raw"));
        let in_qemu = |file: &Path| -> Seen {
            Ok(vec![Backing {
                driver: "raw".to_owned(),
                file: Some(file.to_str().unwrap().to_owned()),
            }])
        };
        let pid = std::process::id() as i32;
        let look = |says: Option<&qcow2::Backing>, seen: &Seen| {
            look(state.path(), "vda", says, (seen, pid)).map_err(|error| {
                assert_eq!(error.code, ErrorCode::Refused);
                error.message
            })
        };
        let seal = || {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_permissions(Permissions::from_mode(0o444)).unwrap();
            let then = std::time::UNIX_EPOCH + Duration::from_secs(1);
            file.set_modified(then).unwrap();
        };
        let why = look(Some(&says_so), &in_qemu(&path)).unwrap_err();
        assert!(why.contains("does not have as a whole"), "{why}");
        seal();
        let base = Base {
            image: [7; 32],
            bytes: 4,
            lazily: false,
            hot: Vec::new(),
        };
        assert_eq!(look(Some(&says_so), &in_qemu(&path)), Ok(Some(base)));
        assert_eq!(look(None, &Ok(Vec::new())), Ok(None));

        let other = state.path().join("other.raw");
        fs::write(&other, "base").unwrap();
        let is_other = says(other.to_str().unwrap().to_owned());
        for (says, seen, expected) in [
            (Some(&says_so), in_qemu(&other), "and in its QEMU on"),
            (Some(&says_so), Ok(Vec::new()), "and in its QEMU on nothing"),
            (None, in_qemu(&path), "of which its own says nothing"),
            (Some(&is_other), in_qemu(&other), "which is no base image"),
            (Some(&says_so), Err("it is mute".to_owned()), "it is mute"),
        ] {
            let why = look(says, &seen).unwrap_err();
            assert!(
                why.starts_with("disk vda: ") && why.contains(expected),
                "{why}"
            );
        }
        drop(read);
        let closed = look(Some(&says_so), &in_qemu(&path)).unwrap_err();
        assert!(closed.contains("and in its QEMU on"), "{closed}");
    }
}
