//! Implements `longhaul image`: works on the repository itself, so it needs no agent.

use crate::cli::args::{DiskFormat, ImageArgs, ImageCommand, ImportArgs, RemoveArgs};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::Line;
use crate::cli::picture::{PICTURE_EVERY, Picture};
use crate::cli::show::image as shown;
use longhaul_image::store::{Place, PlaceError, StoreError};
use longhaul_image::{
    Bases, BringError, FindError, ImageId, ImportError, ImportOptions, Imported, OpenImageError,
    Order, RemoveError, Repository, RepositoryError, Source, SourceError, SourceFormat, Verified,
    VerifyError,
};
use longhaul_migration::host::base_images;
use longhaul_migration::host::config::Config;
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long a fetch waits for a repository that does not answer.
const FETCH_PATIENCE: Duration = Duration::from_secs(60);
/// The default folder for unpacking disks: /tmp is memory on many systems.
const SCRATCH: &str = "/var/tmp";

/// The result of an import.
#[derive(Debug, Serialize)]
pub(crate) struct ImportDocument {
    pub(crate) id: String,
    pub(crate) name: Option<String>,
    pub(crate) size_bytes: u64,
    pub(crate) content_bytes: u64,
    pub(crate) new_bytes: u64,
    pub(crate) stored_bytes: u64,
}

/// An image in a list.
#[derive(Debug, Serialize)]
pub(crate) struct Listed {
    pub(crate) id: String,
    pub(crate) names: Vec<String>,
    /// `None` where its manifest is damaged.
    pub(crate) size_bytes: Option<u64>,
    pub(crate) content_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) damage: Option<String>,
}

/// The images of a repository.
#[derive(Debug, Serialize)]
pub(crate) struct ListDocument {
    pub(crate) repository: String,
    pub(crate) images: Vec<Listed>,
}

/// The result of verifying an image.
#[derive(Debug, Serialize)]
pub(crate) struct VerifiedDocument {
    pub(crate) id: String,
    /// The requested name, or its own.
    pub(crate) called: String,
    pub(crate) good: bool,
    pub(crate) stripes: u64,
    pub(crate) missing: u64,
    pub(crate) damaged: u64,
    pub(crate) first_bad_offset: Option<u64>,
}

/// The results of verifying all images.
#[derive(Debug, Serialize)]
pub(crate) struct VerifyDocument {
    pub(crate) images: Vec<VerifiedDocument>,
}

/// The result of removing images.
#[derive(Debug, Serialize)]
pub(crate) struct RemoveDocument {
    pub(crate) removed: Vec<String>,
    /// Size of the removed content.
    pub(crate) freed_bytes: u64,
    /// Size of content that other images still use.
    pub(crate) kept_bytes: u64,
}

/// The result of fetching an image to this host.
#[derive(Debug, Serialize)]
pub(crate) struct FetchDocument {
    pub(crate) id: String,
    pub(crate) path: PathBuf,
    pub(crate) size_bytes: u64,
    /// Bytes read from the repository; 0 where all of it was here.
    pub(crate) read_bytes: u64,
}

/// Runs the command.
pub(crate) fn run(output: &Output, args: ImageArgs) -> Result<u8, CliError> {
    let config = args.config;
    let place = match args.repository {
        Some(Place::Folder(folder)) => Place::Folder(std::path::absolute(folder)?),
        Some(place) => place,
        None => Config::read(config.as_deref())?.repository,
    };
    match args.command {
        ImageCommand::Import(args) => import(output, &place, args),
        ImageCommand::List => list(output, &open(&place)?),
        ImageCommand::Verify { images } => verify(output, &open(&place)?, &images),
        ImageCommand::Fetch { image } => {
            let bases = base_images::of_host(&Config::read(config.as_deref())?.state);
            fetch(output, open(&place)?, &bases, &image)
        }
        ImageCommand::Remove(args) => remove(output, &open(&place)?, &args),
    }
}

fn open(place: &Place) -> Result<Repository, CliError> {
    Ok(Repository::open(place.store()?)?)
}

fn import(output: &Output, place: &Place, args: ImportArgs) -> Result<u8, CliError> {
    let file = &args.file;
    let format = match args.format {
        Some(DiskFormat::Raw) => SourceFormat::Raw,
        Some(DiskFormat::Qcow2) => SourceFormat::Qcow2,
        None => SourceFormat::of_name(file).ok_or_else(|| {
            CliError::usage(
                format!("the name of {} does not say what it holds", file.display()),
                "say it: --format raw or --format qcow2; it is never guessed from the content, \
                 which a guest could write",
            )
        })?,
    };
    let picture = Picture::new(output);
    let called = file.file_name().unwrap_or(file.as_os_str());
    let called = called.to_string_lossy().into_owned();
    if format == SourceFormat::Qcow2 {
        picture.draw(|_| Line::text(format!("unpacking {called}")));
    }
    let scratch = std::env::var_os("TMPDIR").map_or_else(|| SCRATCH.into(), PathBuf::from);
    let source = Source::open(file, format, &scratch)?;
    let repository = Repository::open_or_make(place.store()?)?;
    let options = ImportOptions {
        name: args.name.clone(),
        rewrite: args.rewrite,
    };
    let imported = longhaul_image::import(&repository, source.disk(), &options, &|progress| {
        picture.draw(|width| shown::importing(&called, &progress, width));
    })?;
    picture.clear();
    let Imported {
        id,
        size_bytes,
        content_bytes,
        new_bytes,
        stored_bytes,
    } = imported;
    let document = ImportDocument {
        id: id.to_string(),
        name: args.name.map(|name| name.to_string()),
        size_bytes,
        content_bytes,
        new_bytes,
        stored_bytes,
    };
    super::show(output, &document, || shown::imported(&document))?;
    Ok(0)
}

fn list(output: &Output, repository: &Repository) -> Result<u8, CliError> {
    let names = repository.names()?;
    let mut images = Vec::new();
    for id in repository.images()? {
        let named = names.iter().filter(|(_, named)| *named == id);
        let names = named.map(|(name, _)| name.to_string()).collect();
        let mut listed = Listed {
            id: id.to_string(),
            names,
            size_bytes: None,
            content_bytes: None,
            damage: None,
        };
        match repository.manifest(id) {
            Ok(manifest) => {
                listed.size_bytes = Some(manifest.size_bytes());
                listed.content_bytes = Some(manifest.stored_bytes());
            }
            Err(RepositoryError::Damaged { reason, .. }) => {
                listed.damage = Some(reason.to_string());
            }
            // It was removed meanwhile.
            Err(RepositoryError::Store(StoreError::Missing { .. })) => continue,
            Err(error) => return Err(error.into()),
        }
        images.push(listed);
    }
    let bad = images.iter().any(|image| image.damage.is_some());
    images.sort_by(|a, b| (a.names.is_empty(), &a.names).cmp(&(b.names.is_empty(), &b.names)));
    let document = ListDocument {
        repository: repository.place(),
        images,
    };
    super::show(output, &document, || shown::list(&document))?;
    Ok(u8::from(bad))
}

/// Returns the images and their displayed names: all of them where none are named.
fn wanted(repository: &Repository, images: &[String]) -> Result<Vec<(ImageId, String)>, CliError> {
    if !images.is_empty() {
        let find = |wanted: &String| Ok((repository.find(wanted)?, wanted.clone()));
        return images.iter().map(find).collect();
    }
    let names = repository.names()?;
    let called = |id: &ImageId| {
        let name = names.iter().find(|(_, named)| named == id);
        name.map_or_else(|| id.short(), |(name, _)| name.to_string())
    };
    let all = repository.images()?;
    Ok(all.iter().map(|id| (*id, called(id))).collect())
}

fn verify(output: &Output, repository: &Repository, images: &[String]) -> Result<u8, CliError> {
    let mut documents = Vec::new();
    for (id, called) in wanted(repository, images)? {
        let picture = Picture::new(output);
        let verified = longhaul_image::verify(repository, id, &|done, all| {
            picture.draw(|width| shown::verifying(&called, done, all, width));
        })?;
        picture.clear();
        let Verified {
            stripes,
            missing,
            damaged,
            first_bad_offset,
        } = verified;
        documents.push(VerifiedDocument {
            id: id.to_string(),
            called,
            good: verified.is_good(),
            stripes,
            missing,
            damaged,
            first_bad_offset,
        });
    }
    let bad = documents.iter().any(|image| !image.good);
    let document = VerifyDocument { images: documents };
    super::show(output, &document, || shown::verified(&document))?;
    Ok(u8::from(bad))
}

fn fetch(
    output: &Output,
    repository: Repository,
    bases: &Bases,
    image: &str,
) -> Result<u8, CliError> {
    let id = repository.find(image)?;
    let failed = |error| BringError::Files { id, error };
    let mut document = FetchDocument {
        id: id.to_string(),
        path: bases.path(id),
        size_bytes: 0,
        read_bytes: 0,
    };
    if let Some(bytes) = bases.whole(id).map_err(failed)? {
        document.size_bytes = bytes;
    } else {
        let bringing = bases.bring(repository, id, FETCH_PATIENCE)?;
        let picture = Picture::new(output);
        thread::scope(|scope| {
            let (done, finished) = mpsc::channel();
            let bringing = &bringing;
            // The receiver waits until the end.
            scope.spawn(move || drop(done.send(bringing.finish(&Order::default()))));
            loop {
                match finished.recv_timeout(PICTURE_EVERY) {
                    Ok(finished) => return finished,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        let error = io::Error::other("a thread broke");
                        return Err(BringError::Files { id, error });
                    }
                }
                let (here, all) = (bringing.here_bytes(), bringing.content_bytes());
                picture.draw(|width| shown::fetching(image, here, all, width));
            }
        })?;
        picture.clear();
        document.size_bytes = bringing.size_bytes();
        document.read_bytes = bringing.read_bytes();
    }
    super::show(output, &document, || shown::fetched(image, &document))?;
    Ok(0)
}

fn remove(output: &Output, repository: &Repository, args: &RemoveArgs) -> Result<u8, CliError> {
    let wanted = wanted(repository, &args.images)?;
    let ids: Vec<ImageId> = wanted.iter().map(|(id, _)| *id).collect();
    let removed = longhaul_image::remove(repository, &ids, args.overrule_imports)?;
    let document = RemoveDocument {
        removed: ids.iter().map(ImageId::to_string).collect(),
        freed_bytes: removed.stripes * longhaul_image::STRIPE_BYTES,
        kept_bytes: removed.kept * longhaul_image::STRIPE_BYTES,
    };
    super::show(output, &document, || {
        shown::removed(&args.images, &document)
    })?;
    Ok(0)
}

/// Returns advice for an error of a store.
fn hint(error: &StoreError) -> Option<String> {
    match error {
        StoreError::Refused { store, .. } if store.starts_with("s3://") => Some(
            "the account is taken from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION"
                .to_owned(),
        ),
        StoreError::Away { store, .. } if store.starts_with("s3://") => Some(
            "the service is taken from AWS_ENDPOINT_URL; without TLS only with AWS_ALLOW_HTTP=true"
                .to_owned(),
        ),
        StoreError::Refused { .. } => {
            Some("see that this user may read and write there, and that there is room".to_owned())
        }
        StoreError::Away { .. } | StoreError::Missing { .. } | StoreError::TooLong { .. } => None,
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        Self::image(error.to_string(), hint(&error), 1)
    }
}

impl From<PlaceError> for CliError {
    fn from(error: PlaceError) -> Self {
        Self::image(error.to_string(), None, 2)
    }
}

impl From<RepositoryError> for CliError {
    fn from(error: RepositoryError) -> Self {
        match error {
            RepositoryError::Store(error) => error.into(),
            RepositoryError::None { .. } => {
                let hint = "longhaul image import FILE; another repository is named by \
                            --repository, or by `repository` in agent.toml";
                Self::image(error.to_string(), Some(hint.to_owned()), 3)
            }
            other => Self::image(other.to_string(), None, 1),
        }
    }
}

impl From<FindError> for CliError {
    fn from(error: FindError) -> Self {
        match error {
            FindError::Store(error) => error.into(),
            other => Self::usage(other.to_string(), "`longhaul image list` lists them"),
        }
    }
}

impl From<SourceError> for CliError {
    fn from(error: SourceError) -> Self {
        Self::image(error.to_string(), None, 3)
    }
}

impl From<ImportError> for CliError {
    fn from(error: ImportError) -> Self {
        match error {
            ImportError::Store(error) => error.into(),
            ImportError::NameTaken { .. } => Self::image(
                error.to_string(),
                Some("the content is stored already: importing it again is quick".to_owned()),
                3,
            ),
            ImportError::Removal { .. } => {
                let hint = "if it never will, since its host is gone: delete the repository's \
                            objects markers/removal-*";
                Self::image(error.to_string(), Some(hint.to_owned()), 1)
            }
            other => Self::image(other.to_string(), None, 1),
        }
    }
}

impl From<BringError> for CliError {
    fn from(error: BringError) -> Self {
        match error {
            BringError::Open(OpenImageError::Repository(error)) => error.into(),
            BringError::Failed { id, .. } => {
                let hint = format!("longhaul image verify {} looks at all of it", id.short());
                Self::image(error.to_string(), Some(hint), 1)
            }
            other => Self::image(other.to_string(), None, 1),
        }
    }
}

impl From<RemoveError> for CliError {
    fn from(error: RemoveError) -> Self {
        match error {
            RemoveError::Repository(error) => error.into(),
            RemoveError::Import { .. } => {
                let hint = "remove again when that has ended; if it never will: --overrule-imports";
                Self::image(error.to_string(), Some(hint.to_owned()), 3)
            }
        }
    }
}

impl From<VerifyError> for CliError {
    fn from(error: VerifyError) -> Self {
        match error {
            VerifyError::Repository(error) => error.into(),
            VerifyError::Store(error) => error.into(),
            VerifyError::Thread => Self::image(error.to_string(), None, 1),
        }
    }
}
