//! Compares the files that this host has under a guest's names with the source's. After the guest's
//! QEMU was launched, checks that QEMU has opened the compared files.

use crate::context::Context;
use crate::disks::images;
use crate::files::{Place, Staying, is_file_or_volume, of_guest, open, stands_on};
use crate::limits::peer_quota;
use longhaul_hypervisor::has_open;
use longhaul_protocol::disk::OfferedDisk;
use longhaul_protocol::files::{FileClaim, FileContent, FileKind};
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Verdict};
use longhaul_protocol::wire::VERSION_OF_IMAGES;
use longhaul_storage::same_file::{Which, locks};
use longhaul_transport::TrustedHost;
use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, FsType, TMPFS_MAGIC, XFS_SUPER_MAGIC, fstatfs,
};
use std::fs::{self, File, Metadata};
use std::io;
use std::path::PathBuf;
use tokio::task::spawn_blocking;

/// The result for all files of a guest that do not move with it.
#[derive(Default)]
pub(crate) struct Proof {
    /// A check for each file.
    pub(crate) checks: Vec<Check>,
    /// The indexes of claims that lack the content of the source's file, which is needed.
    pub(crate) wanted: Vec<u16>,
    /// The indexes of claims about read-only images that this host lacks, and that move along.
    pub(crate) lacking: Vec<u16>,
    found: Vec<Found>,
}

/// A file of this host that was compared.
struct Found {
    staying: Staying,
    path: PathBuf,
    about: Metadata,
    /// Held open, so that no other file gets its inode number meanwhile.
    _file: Option<File>,
    /// Whether the file was identified by its content alone.
    by_content: bool,
}

/// The result for one file.
enum Outcome {
    Locks,
    Content([u8; 32]),
    /// By the configuration, and the local file system that the file is on here, if it is on one.
    Believed(Option<&'static str>),
    Wanted,
    Refused(String, String),
}

/// Which read-only images can move along.
#[derive(Clone, Copy)]
pub(crate) enum Bringing<'a> {
    /// None: the source is too old.
    Nothing,
    /// Those that this host lacks.
    Lacking,
    /// Those of these offered disks.
    Offered(&'a [OfferedDisk]),
}

impl Bringing<'_> {
    /// Returns what a source of this version can bring.
    pub(crate) fn by(version: u16) -> Self {
        match version < VERSION_OF_IMAGES {
            true => Self::Nothing,
            false => Self::Lacking,
        }
    }

    /// Returns whether it can be this image of a guest.
    fn brings(self, guest: &GuestDescription, image: &str) -> bool {
        let mut disks = guest.disks.iter().filter(|disk| disk.image == image);
        disks.any(|disk| {
            disk.moves_if_lacking()
                && match self {
                    Self::Nothing => false,
                    Self::Lacking => true,
                    Self::Offered(disks) => disks.iter().any(|offered| offered.name == disk.name),
                }
        })
    }
}

/// The peer that asks, and the guest it asks about.
struct Question<'a> {
    here: &'a str,
    peer: &'a str,
    guest: &'a GuestDescription,
    brings: Bringing<'a>,
}

/// Compares the files that a guest names here with a peer's claims about its own. No other file of
/// this host is inspected, regardless of the claims.
pub(crate) async fn prove(
    context: &Context,
    peer: &TrustedHost,
    (guest, brings): (&GuestDescription, Bringing<'_>),
    claims: Option<&[FileClaim]>,
) -> Proof {
    let mut proof = Proof::default();
    let config = &context.parts.config;
    // Other checks refuse a description that breaks the rules.
    if longhaul_hypervisor::description::check(guest).is_err() {
        return proof;
    }
    let files = of_guest(&config.hypervisor, guest);
    if let Err(refusal) = peer_quota::may_name(context, peer, guest) {
        proof.refuse(refusal.text, refusal.hint.unwrap_or_default());
        return proof;
    }
    let question = Question {
        here: &config.name,
        peer: &peer.name,
        guest,
        brings,
    };
    let Some(claims) = claims else {
        let known = files
            .iter()
            .flatten()
            .map(|place| place.staying.to_string());
        question.untold(&known.collect::<Vec<_>>(), &mut proof);
        return proof;
    };
    let known = files.iter().flatten().map(|place| &place.staying);
    let known: Vec<_> = known.map(|file| (file.kind, file.name.clone())).collect();
    question.only_there(&known, claims, &mut proof);
    question.shared_there(&known, claims, &mut proof);
    for place in files {
        // Other checks refuse names that are unknown here.
        let Ok(place) = place else { continue };
        let mut next = Some(place);
        while let Some(place) = next {
            next = question.add(context, peer, place, claims, &mut proof).await;
        }
    }
    proof
}

impl Question<'_> {
    /// Adds the result for one file. Returns its backing file if the file is the source's.
    async fn add(
        &self,
        context: &Context,
        peer: &TrustedHost,
        place: Place,
        claims: &[FileClaim],
        proof: &mut Proof,
    ) -> Option<Place> {
        let staying = place.staying.clone();
        let of = |claim: &FileClaim, kind| claim.kind == kind && claim.name == staying.name;
        let Some(at) = claims.iter().position(|claim| of(claim, staying.kind)) else {
            let has_kernel = claims.iter().any(|claim| of(claim, FileKind::Kernel));
            match staying.kind == FileKind::Initrd && has_kernel {
                true => self.only_one(&staying.name, (self.here, self.peer), proof),
                false if self.guest.variables() == Some(&staying.name) => {
                    self.one_is_local(&staying.name, (self.peer, self.here), proof);
                }
                false => self.untold(&[staying.to_string()], proof),
            }
            return None;
        };
        if self.comes_or_arrives(context, &place, (claims, at), proof) {
            return None;
        }
        let compared = self.compare(context, peer, place, &claims[at]).await;
        let compared = compared.unwrap_or_else(|error| Compared {
            outcome: self.no_file(&staying, &claims[at], &error),
            found: None,
            next: Ok(None),
        });
        let Compared {
            outcome,
            found,
            next,
        } = compared;
        proof.found.extend(found);
        self.tell(&staying, outcome, at, proof);
        next.unwrap_or_else(|why| {
            let hint = "make one plain image of it: qemu-img convert -O qcow2 OLD NEW";
            proof.refuse(format!("{staying}: {why}"), hint.to_owned());
            None
        })
    }

    /// Adds the result for a read-only image that this host lacks, or that just arrives with
    /// another guest. Returns false for other files.
    fn comes_or_arrives(
        &self,
        context: &Context,
        place: &Place,
        (claims, at): (&[FileClaim], usize),
        proof: &mut Proof,
    ) -> bool {
        let (staying, here) = (&place.staying, self.here);
        if staying.kind != FileKind::Image || !staying.read_only {
            return false;
        }
        if self.is_lacking(place, claims) {
            match images::free_path(context, &staying.name, "the guest") {
                Ok(_) => self.comes(staying, at, proof),
                Err(refusal) => proof.refuse(refusal.text, refusal.hint.unwrap_or_default()),
            }
            return true;
        }
        // A file that another guest brings is complete once that guest is here.
        match images::is_arriving(context, &place.path) {
            Ok(false) => return false,
            Ok(true) => proof.refuse(
                format!("{staying} just arrives on {here} with another guest"),
                "wait until that guest is there".to_owned(),
            ),
            Err(error) => {
                let text = format!("{here} cannot tell which images just arrive: {error}");
                proof.refuse(text, String::new());
            }
        }
        true
    }

    /// Returns whether this host has no file of a read-only image, and the source can bring it. An
    /// image that stands on another one does not move.
    fn is_lacking(&self, place: &Place, claims: &[FileClaim]) -> bool {
        let Place { staying, path, .. } = place;
        let backing = |claim: &FileClaim| {
            matches!(claim.kind, FileKind::Backing(_)) && claim.name == staying.name
        };
        let absent = || {
            let found = fs::symlink_metadata(path);
            found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        self.brings.brings(self.guest, &staying.name) && !claims.iter().any(backing) && absent()
    }

    fn comes(&self, staying: &Staying, place: usize, proof: &mut Proof) {
        let text = format!("{staying}: {} has none, and it moves along", self.here);
        proof.lacking.push(place as u16);
        proof.checks.push(Check {
            verdict: Verdict::Fine,
            text,
            hint: None,
        });
    }

    /// Compares one file.
    async fn compare(
        &self,
        context: &Context,
        peer: &TrustedHost,
        place: Place,
        claim: &FileClaim,
    ) -> io::Result<Compared> {
        // Storage that hangs blocks only worker threads of the peer that asks.
        let worker = context.allowances.worker(peer).await;
        let staying = &place.staying;
        let image = context.parts.config.hypervisor.image(&staying.name);
        let image = image.filter(|_| staying.kind == FileKind::Image);
        let word = image.and_then(|image| image.same_file_as);
        let word = word.is_some_and(|word| word.is(&peer.name, &claim.path));
        let (contents, said) = (context.contents.clone(), claim.path.clone());
        let claim = claim.clone();
        let looking = spawn_blocking(move || {
            let _worker = worker;
            let (found, seen) = look(&place, &claim, word, |file| contents.of(file))?;
            // The backing file is followed only if both hosts have the same file.
            let same = matches!(&seen, Seen::Outcome(outcome) if outcome.is_same());
            let next = match same {
                true => stands_on(&place),
                false => Ok(None),
            };
            io::Result::Ok((found, seen, next))
        });
        let (found, seen, next) = looking.await.map_err(io::Error::other)??;
        let outcome = match seen {
            Seen::Outcome(outcome) => outcome,
            Seen::Other(content) => self.different(&found.staying, &content, &said),
            Seen::Nothing(why) => self.unproved(&found.staying, &why, &said),
        };
        Ok(Compared {
            outcome,
            found: Some(found),
            next,
        })
    }

    fn untold(&self, files: &[String], proof: &mut Proof) {
        if files.is_empty() {
            return;
        }
        let Self { here, peer, .. } = self;
        proof.refuse(
            format!(
                "{here} was not told which file {peer} has of {}, and does not believe that its \
                 own is the same",
                files.join(", ")
            ),
            format!("update the agent on {peer}, if it is older than that on {here}"),
        );
    }

    /// Refuses an initrd that only the source has.
    fn only_there(&self, known: &[(FileKind, String)], claims: &[FileClaim], proof: &mut Proof) {
        let here = |kind, name: &String| known.contains(&(kind, name.clone()));
        let initrds = claims.iter().filter(|it| it.kind == FileKind::Initrd);
        let lacks = |name: &&String| here(FileKind::Kernel, name) && !here(FileKind::Initrd, name);
        for name in initrds.map(|claim| &claim.name).filter(lacks) {
            self.only_one(name, (self.peer, self.here), proof);
        }
    }

    /// Refuses an image of the firmware's variables that is `local` here and not at the source.
    fn shared_there(&self, known: &[(FileKind, String)], claims: &[FileClaim], proof: &mut Proof) {
        let Some(name) = self.guest.variables() else {
            return;
        };
        let claimed = |claim: &FileClaim| claim.kind == FileKind::Image && claim.name == *name;
        if !known.contains(&(FileKind::Image, name.clone())) && claims.iter().any(claimed) {
            self.one_is_local(name, (self.here, self.peer), proof);
        }
    }

    fn one_is_local(&self, name: &str, (local, shared): (&str, &str), proof: &mut Proof) {
        proof.refuse(
            format!(
                "image {name}, which holds the firmware's variables, moves along from {local} and \
                 not from {shared}"
            ),
            format!(
                "if each host has a file of its own: write `local = true` under [images.{name}] on \
                 both; if it is one file: on neither"
            ),
        );
    }

    fn only_one(&self, name: &str, (has, lacks): (&str, &str), proof: &mut Proof) {
        proof.refuse(
            format!("kernel {name} has an initrd on {has}, and none on {lacks}"),
            format!("write the same under [kernels.{name}] in both configurations"),
        );
    }

    fn no_file(&self, staying: &Staying, claim: &FileClaim, error: &io::Error) -> Outcome {
        let Self { here, .. } = self;
        let text = format!("{here} cannot use its file of {staying}: {error}");
        Outcome::Refused(text, self.ways(staying, &claim.path))
    }

    fn different(&self, staying: &Staying, ours: &Differs, path: &str) -> Outcome {
        let Self { here, peer, .. } = self;
        let what = match ours {
            // The image names this file, and could name any file of this host: no details are sent.
            _ if matches!(staying.kind, FileKind::Backing(_)) => "what it holds differs".to_owned(),
            Differs::Length { there, here: ours } => {
                format!("{there} bytes on {peer}, {ours} bytes on {here}")
            }
            Differs::Digest { there, here: ours } => format!(
                "BLAKE3 {}... on {peer}, {}... on {here}",
                short(there),
                short(ours)
            ),
        };
        let text = format!("{staying} is not the same on both hosts: {what}");
        Outcome::Refused(text, self.ways(staying, path))
    }

    fn unproved(&self, staying: &Staying, why: &Why, path: &str) -> Outcome {
        let Self { here, peer, .. } = self;
        let why = match why {
            Why::Unseen => {
                format!("the locks that {peer} holds on its file are not on that of {here}")
            }
            Why::NotTaken => format!("{peer} cannot lock its file"),
            Why::Untold(error) => format!("that of {here} does not tell of locks ({error})"),
            Why::Closed(error) => format!("the agent on {here} cannot open its own ({error})"),
        };
        let text =
            format!("{staying}: nothing proves that {here} has the same file as {peer}: {why}");
        Outcome::Refused(text, self.ways(staying, path))
    }

    /// Returns what an operator can do about a file that is different or not proved to be the same.
    fn ways(&self, staying: &Staying, path: &str) -> String {
        let Self {
            here, peer, guest, ..
        } = self;
        let name = &staying.name;
        let disk = guest.disks.iter().any(|disk| disk.image == *name);
        if staying.read_only {
            let table = match staying.kind {
                FileKind::Image => format!("[images.{name}]"),
                FileKind::Firmware => "[firmware]".to_owned(),
                FileKind::Kernel | FileKind::Initrd => format!("[kernels.{name}]"),
                FileKind::Backing(_) => {
                    return format!(
                        "copy the file of {peer} to {here}, where image {name} names it, or make \
                         one plain image of both: qemu-img convert -O qcow2 OLD NEW"
                    );
                }
            };
            let copy = format!(
                "copy the file of {peer} to {here}, or name the right one under {table} in the \
                 configuration of {here}"
            );
            let mut disks = guest.disks.iter();
            let shared = disks.any(|disk| disk.image == *name && disk.shared);
            return match (staying.kind, shared, guest.hardware.is_some()) {
                (FileKind::Image, true, true) => format!(
                    "{copy}; or write `local = true` under {table} in the configuration of \
                     {peer}: where there is no file yet, it moves along"
                ),
                (FileKind::Image, true, false) => format!(
                    "{copy}; or describe the disk without `shared = true`: where there is no file \
                     yet, it moves along"
                ),
                _ => copy,
            };
        }
        // The path is the peer's own, so it may be sent back.
        let plain = |c: char| !c.is_control() && c != '"';
        let path = Some(path).filter(|path| path.chars().all(plain));
        let path = path.unwrap_or("PATH");
        let along = match (staying.kind, guest.hardware.is_some()) {
            (FileKind::Image, true) if disk => format!(
                "if each host has a file of its own: write `local = true` under [images.{name}] \
                 on both, and the disk moves along; "
            ),
            (FileKind::Image, false) if disk => {
                "if each host has a file of its own: describe the disk with \
                 `shared = false`, and it moves along; "
                    .to_owned()
            }
            _ => String::new(),
        };
        format!(
            "{along}if {here} sees the file of {peer} elsewhere: give [images.{name}] that path; \
             if it is one file nevertheless, on storage that tells hosts nothing of each other's \
             locks: write same_file_as = \"{peer}:{path}\" under [images.{name}] in the \
             configuration of {here}"
        )
    }

    fn tell(&self, staying: &Staying, outcome: Outcome, place: usize, proof: &mut Proof) {
        let check = |verdict, text, hint| Check {
            verdict,
            text,
            hint,
        };
        let one = match outcome {
            Outcome::Locks => {
                let text = format!("{staying}: one file on both hosts (proved by locks)");
                check(Verdict::Fine, text, None)
            }
            Outcome::Content(digest) => {
                let text = format!("{staying}: equal content (BLAKE3 {}...)", short(&digest));
                check(Verdict::Fine, text, None)
            }
            Outcome::Believed(local) => {
                let Self { here, peer, .. } = self;
                let local = local.map_or(String::new(), |kind| {
                    format!(", and on {here} it is on a local file system ({kind})")
                });
                let text = format!(
                    "{staying}: believed to be one file on both hosts, since the configuration of \
                     {here} says so; nothing proves it{local}"
                );
                let hint = format!(
                    "if it is not the file that {peer} has, the guest loses its data: then take \
                     `same_file_as` out of [images.{}]",
                    staying.name
                );
                check(Verdict::Warning, text, Some(hint))
            }
            Outcome::Refused(text, hint) => check(Verdict::Refused, text, Some(hint)),
            Outcome::Wanted => {
                proof.wanted.push(place as u16);
                return;
            }
        };
        proof.checks.push(one);
    }
}

impl Proof {
    fn refuse(&mut self, text: String, hint: String) {
        self.checks.push(Check {
            verdict: Verdict::Refused,
            text,
            hint: Some(hint).filter(|hint| !hint.is_empty()),
        });
    }

    /// Checks that the guest's QEMU, which has been launched meanwhile, uses the compared files.
    pub(crate) fn holds(&self, pid: i32) -> Result<(), String> {
        self.found.iter().try_for_each(|found| found.holds(pid))
    }
}

impl Found {
    fn holds(&self, pid: i32) -> Result<(), String> {
        let Self { staying, about, .. } = self;
        let exchanged = || {
            format!(
                "the file of {staying} was exchanged while the guest's QEMU was started; nothing \
                 was moved"
            )
        };
        let unseen =
            |error: io::Error| format!("cannot tell which file QEMU has of {staying}: {error}");
        let now = || fs::metadata(&self.path).map_err(unseen);
        if staying.opened {
            if !has_open(pid, about).map_err(unseen)? {
                return Err(exchanged());
            }
            if !self.by_content {
                return Ok(());
            }
        }
        // QEMU has read and closed the file, or it was identified by its content: it must not have
        // been written.
        match Which::of(&now()?).is_unwritten(&Which::of(about)) {
            true => Ok(()),
            false => Err(exchanged()),
        }
    }
}

/// The result of comparing one file, and its backing file.
struct Compared {
    outcome: Outcome,
    found: Option<Found>,
    next: Result<Option<Place>, String>,
}

impl Outcome {
    /// Returns whether both hosts have the same file, as far as that can be proved or is
    /// configured.
    fn is_same(&self) -> bool {
        matches!(self, Self::Locks | Self::Content(_) | Self::Believed(_))
    }
}

enum Seen {
    Outcome(Outcome),
    Other(Differs),
    /// Nothing is proved.
    Nothing(Why),
}

/// Why locks prove nothing.
enum Why {
    /// The source's locks are not on this file.
    Unseen,
    /// The source holds no locks.
    NotTaken,
    /// The file system does not report locks.
    Untold(io::Error),
    /// The file cannot be opened.
    Closed(io::Error),
}

enum Differs {
    Length { there: u64, here: u64 },
    Digest { there: [u8; 32], here: [u8; 32] },
}

/// Inspects one file. This can take as long as reading it.
fn look(
    place: &Place,
    claim: &FileClaim,
    word: bool,
    content: impl Fn(&File) -> io::Result<FileContent>,
) -> io::Result<(Found, Seen)> {
    let Place { staying, path, .. } = place;
    let opened = open(path);
    // A file that this agent may not read may be readable for QEMU's user: its metadata still
    // identify it.
    let about = match &opened {
        Ok(file) => file.metadata()?,
        Err(_) => fs::metadata(path)?,
    };
    if !is_file_or_volume(&about) {
        return Err(io::Error::other("it is no file and no volume"));
    }
    let mut by_content = false;
    let (opened, closed) = match opened {
        Ok(file) => (Some(file), None),
        Err(error) => (None, Some(error)),
    };
    let seen = match &opened {
        Some(file) => {
            let locks = seen_by_locks(claim, file);
            match locks {
                Ok(()) => Seen::Outcome(Outcome::Locks),
                Err(_) if staying.read_only && about.is_file() => {
                    by_content = true;
                    seen_by_content(claim, file, &about, content)?
                }
                Err(why) => Seen::Nothing(why),
            }
        }
        None => Seen::Nothing(closed.map_or(Why::Unseen, Why::Closed)),
    };
    let seen = match seen {
        Seen::Nothing(_) if word => {
            let local = opened.as_ref().filter(|_| about.is_file());
            Seen::Outcome(Outcome::Believed(local.and_then(local_file_system)))
        }
        seen => seen,
    };
    let found = Found {
        staying: staying.clone(),
        path: path.clone(),
        about,
        _file: opened,
        by_content,
    };
    Ok((found, seen))
}

/// Returns the kind of a file's file system, if that is one of this host alone. No other host can
/// see the file, except through a file system that this host shares.
fn local_file_system(file: &File) -> Option<&'static str> {
    const ZFS: FsType = FsType(0x2fc1_2fc1);
    let kinds = [
        (EXT4_SUPER_MAGIC, "ext4"),
        (XFS_SUPER_MAGIC, "xfs"),
        (BTRFS_SUPER_MAGIC, "btrfs"),
        (TMPFS_MAGIC, "tmpfs"),
        (ZFS, "zfs"),
    ];
    let kind = fstatfs(file).ok()?.filesystem_type();
    let known = kinds.into_iter().find(|(known, _)| *known == kind);
    known.map(|(_, name)| name)
}

fn seen_by_locks(claim: &FileClaim, file: &File) -> Result<(), Why> {
    let pattern = claim.locks.as_ref().ok_or(Why::NotTaken)?;
    match locks::are_on(pattern, file).map_err(Why::Untold)? {
        true => Ok(()),
        false => Err(Why::Unseen),
    }
}

fn seen_by_content(
    claim: &FileClaim,
    file: &File,
    about: &Metadata,
    content: impl Fn(&File) -> io::Result<FileContent>,
) -> io::Result<Seen> {
    let Some(there) = claim.content else {
        return Ok(Seen::Outcome(Outcome::Wanted));
    };
    if there.bytes != about.len() {
        let (there, here) = (there.bytes, about.len());
        return Ok(Seen::Other(Differs::Length { there, here }));
    }
    let ours = content(file)?;
    Ok(match ours == there {
        true => Seen::Outcome(Outcome::Content(ours.digest)),
        false => Seen::Other(Differs::Digest {
            there: there.digest,
            here: ours.digest,
        }),
    })
}

/// Returns the first 6 bytes of a digest in hexadecimal.
fn short(digest: &[u8; 32]) -> String {
    digest[..6]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uefi_guest() -> GuestDescription {
        toml::from_str(
            "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
             memory_mib = 64\n[hardware.flash]\ncode = \"ovmf\"\nvariables = \"vars\"\n",
        )
        .unwrap()
    }

    #[test]
    fn variables_that_are_local_on_one_host_only_are_refused() {
        let guest = uefi_guest();
        let question = Question {
            here: "paris",
            peer: "lyon",
            guest: &guest,
            brings: Bringing::Nothing,
        };
        let claim = FileClaim {
            kind: FileKind::Image,
            name: "vars".to_owned(),
            path: "/srv/vars.fd".to_owned(),
            locks: None,
            content: None,
        };
        let refused = |known: &[(FileKind, String)], claims: &[FileClaim]| {
            let mut proof = Proof::default();
            question.shared_there(known, claims, &mut proof);
            proof.checks.into_iter().next()
        };
        // Of files here, those that are local are not in the list.
        let check = refused(&[], std::slice::from_ref(&claim)).unwrap();
        assert_eq!(check.verdict, Verdict::Refused);
        assert!(
            check.text.contains("from paris and not from lyon"),
            "{check:?}"
        );
        assert!(check.hint.unwrap().contains("[images.vars]"));
        assert!(refused(&[], &[]).is_none(), "local on both");
        let known = [(FileKind::Image, "vars".to_owned())];
        assert!(refused(&known, &[claim]).is_none(), "shared on both");
    }

    #[test]
    fn a_source_brings_only_read_only_images_that_are_not_shared() {
        let guest: GuestDescription = toml::from_str(
            "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
             memory_mib = 64\ndisks = [\
             { name = \"vda\", image = \"own\" }, \
             { name = \"cd0\", image = \"seed\", read_only = true }, \
             { name = \"cd1\", image = \"iso\", read_only = true, shared = true }]\n",
        )
        .unwrap();
        let brought = |brings: Bringing<'_>| {
            ["own", "seed", "iso", "other"].map(|image| brings.brings(&guest, image))
        };
        assert_eq!(brought(Bringing::by(2)), [false; 4]);
        assert_eq!(brought(Bringing::by(3)), [false, true, false, false]);
        let offered = |name: &str| OfferedDisk {
            region: longhaul_protocol::RegionId(1),
            name: name.to_owned(),
            image_bytes: 4096,
            allocated_bytes: 4096,
            format: longhaul_protocol::disk::DiskFormat::Raw,
            pulled: longhaul_protocol::disk::Pulled::Nothing,
            base: None,
        };
        let own = [offered("vda"), offered("cd1")];
        assert_eq!(brought(Bringing::Offered(&own)), [false; 4]);
        let seed = [offered("cd0")];
        assert_eq!(
            brought(Bringing::Offered(&seed)),
            [false, true, false, false]
        );
    }
}
