//! The place of a repository, as in a configuration or a command line.

#[cfg(feature = "s3")]
use super::s3::{S3Place, S3SetupError, S3Store};
use super::{FolderStore, Store};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// A folder, or a bucket of an S3-compatible service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A folder.
    Folder(PathBuf),
    /// A bucket, or a prefix in one.
    #[cfg(feature = "s3")]
    S3(S3Place),
}

/// A reason why a place is unusable.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Its scheme is unknown.
    #[error("{0} is neither a folder nor s3://BUCKET or s3://BUCKET/PREFIX")]
    Kind(String),
    /// The bucket is unusable.
    #[cfg(feature = "s3")]
    #[error(transparent)]
    S3(#[from] S3SetupError),
}

impl FromStr for Place {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        match text {
            #[cfg(feature = "s3")]
            text if text.starts_with("s3://") => Ok(Self::S3(text.parse()?)),
            text if text.is_empty() || text.contains("://") => {
                Err(PlaceError::Kind(text.to_owned()))
            }
            folder => Ok(Self::Folder(folder.into())),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
            #[cfg(feature = "s3")]
            Self::S3(place) => place.fmt(f),
        }
    }
}

impl Place {
    /// Returns the store there, without any request.
    pub fn store(&self) -> Result<Arc<dyn Store>, PlaceError> {
        match self {
            Self::Folder(folder) => Ok(Arc::new(FolderStore::new(folder))),
            #[cfg(feature = "s3")]
            Self::S3(place) => Ok(Arc::new(S3Store::new(place.clone())?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        for good in ["/srv/images", "images", "s3://images/a"] {
            assert_eq!(good.parse::<Place>().unwrap().to_string(), good);
        }
        for bad in ["", "http://images", "gs://images", "s3://"] {
            let error = bad.parse::<Place>().unwrap_err().to_string();
            assert!(error.contains("s3://BUCKET"), "{error}");
        }
    }
}
